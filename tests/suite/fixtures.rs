//! What Hugging Face Transformers computes on tiny models, under every layout.

use std::{error::Error, path::PathBuf};

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, kind::Basic},
};
use megaburn::{
    collective::{GroupOptions, ProcessGroups, ReduceOp, run_threads},
    mesh::{Layout, ShardPlan},
    models::{
        Llama, LlamaConfig,
        hf::{HfKeys, HfSource, HfTensors},
    },
    optim::{AdamWConfig, GradientAccumulator},
    parallel::{load_params, shard_plan},
};
use rstest::rstest;

use crate::gather::{LocalParams, gather, relative_distance};

/// As in `reference.json`, like the defaults of `AdamWConfig`.
const LEARNING_RATE: f64 = 1e-3;

type Failure = Box<dyn Error + Send + Sync>;

/// A model of Transformers, and what it computes.
struct Fixture {
    config: LlamaConfig,
    weights: HfTensors,
    reference: HfTensors,
}

impl Fixture {
    fn open(name: &str) -> Result<Self, Failure> {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name);
        Ok(Self {
            config: LlamaConfig::from_hf(&dir.join("config.json"))?,
            weights: HfTensors::open(&dir.join("model.safetensors"))?,
            reference: HfTensors::open(&dir.join("reference.safetensors"))?,
        })
    }

    fn numbers(&self, name: &str) -> Result<Vec<f32>, Failure> {
        Ok(self.reference.tensor(name)?.try_to_vec()?)
    }
}

fn source(path: &str) -> HfSource {
    Llama::hf_source(path).expect("every parameter has a source")
}

/// A rank's samples of `[B, S, ..]`, as `[S, B / dp, ..]`.
fn share<const D: usize, K: Basic>(all: Tensor<D, K>, groups: &ProcessGroups) -> Tensor<D, K> {
    let samples = all.dims()[0] / groups.dp.size();
    all.narrow(0, groups.dp.rank() * samples, samples).swap_dims(0, 1)
}

/// One rank's model and samples.
struct Rank {
    model: Llama,
    plan: ShardPlan,
    /// `[S, B / dp]` each; the last label is ignored.
    tokens: Tensor<2, Int>,
    labels: Tensor<2, Int>,
    groups: ProcessGroups,
}

/// What a rank computes.
struct Found {
    /// Largest difference from the reference.
    logits: f64,
    grads: LocalParams,
    /// Before each update.
    losses: Vec<f64>,
}

impl Rank {
    fn new(fixture: &Fixture, groups: ProcessGroups) -> Result<Self, Failure> {
        let device = Device::flex().autodiff();
        let model = fixture.config.init(&groups.tp, groups.layout().sp, &device)?;
        let plan = shard_plan(&model)?;
        let model = load_params(model, |path, _| {
            let spec = &plan.get(path).expect("every parameter is planned").shard;
            fixture.weights.shard(&source(path), "", spec)
        })?;
        let ids = fixture.reference.tensor("input_ids")?;
        let tokens = share(Tensor::<2, Int>::from_data(ids, &Device::flex()), &groups);
        let [seq, batch] = tokens.dims();
        let ignored = Tensor::full([1, batch], -100, &Device::flex());
        let labels = Tensor::cat(vec![tokens.clone().narrow(0, 1, seq - 1), ignored], 0);
        Ok(Self { model, plan, tokens, labels, groups })
    }

    fn logits_difference(&self, fixture: &Fixture) -> Result<f64, Failure> {
        let expected = fixture.reference.tensor("logits")?;
        let expected = share(Tensor::<3>::from_data(expected, &Device::flex()), &self.groups);
        let found = self.model.full_logits(self.tokens.clone()).inner();
        Ok((found - expected).abs().max().into_scalar::<f32>().into())
    }

    /// Returns the mean loss; its gradients are in `grads` then.
    fn backward(&self, grads: &mut GradientAccumulator) -> Result<f64, Failure> {
        let dp = &self.groups.dp;
        let (sum, count) = self.model.loss(self.tokens.clone(), self.labels.clone());
        let whole = dp.all_reduce(sum.clone().inner().into_data(), ReduceOp::Sum)?;
        let tokens = (count * dp.size()) as f64;
        grads.reset();
        grads.accumulate(&self.model, &mut sum.backward());
        grads.reduce(dp)?;
        grads.scale(1.0 / tokens);
        Ok(f64::from(whole.try_to_vec::<f32>()?[0]) / tokens)
    }

    /// Compares the logits, then trains on the one batch for as many steps as the reference.
    fn run(mut self, fixture: &Fixture) -> Result<Found, Failure> {
        let logits = self.logits_difference(fixture)?;
        let mut grads = GradientAccumulator::new(&self.model, &self.plan)?;
        let mut first = None;
        let mut losses = Vec::new();
        let mut optimizer = AdamWConfig::new().init()?;
        for _ in fixture.numbers("train_losses")? {
            losses.push(self.backward(&mut grads)?);
            first.get_or_insert_with(|| self.local(&grads));
            self.model = optimizer.step(LEARNING_RATE, self.model, &grads);
        }
        Ok(Found { logits, grads: first.expect("the reference takes a step"), losses })
    }

    fn local(&self, grads: &GradientAccumulator) -> LocalParams {
        let local = |path| grads.get(path).expect("every parameter has a gradient").into_data();
        let all = self.plan.iter();
        all.map(|(path, spec)| {
            (path.to_string(), local(path).try_to_vec().unwrap(), spec.shard.clone())
        })
        .collect()
    }
}

#[rstest]
fn llama_equals_transformers_under_every_layout(
    #[values("llama", "llama3-scaled")] name: &str,
    #[values(
        "tp1",
        "dp2",
        "dp4",
        "tp2",
        "tp2-sp",
        "tp2-dp2",
        "tp2-dp2-sp",
        "tp2-dp4-sp",
        "tp4",
        "tp4-sp",
        "tp4-dp2",
        "tp4-dp2-sp",
        "tp8",
        "tp8-sp"
    )]
    layout: Layout,
) {
    let fixture = Fixture::open(name).unwrap();
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        Rank::new(&fixture, ProcessGroups::new(&world, layout)?)?.run(&fixture)
    });
    let ranks: Vec<Found> = ranks.into_iter().map(Result::unwrap).collect();

    let loss = fixture.numbers("loss").unwrap()[0];
    let train_losses = fixture.numbers("train_losses").unwrap();
    for Found { logits, losses, .. } in &ranks {
        assert!(*logits <= 1e-4, "logits differ by {logits}");
        let difference = (losses[0] - f64::from(loss)).abs();
        assert!(difference <= 1e-5, "the loss differs by {difference}");
        for (step, (found, expected)) in losses.iter().zip(&train_losses).enumerate() {
            let difference = (found - f64::from(*expected)).abs();
            assert!(difference <= 1e-4, "the loss of step {} differs by {difference}", step + 1);
        }
    }
    let grads: Vec<LocalParams> = ranks.into_iter().map(|found| found.grads).collect();
    for (path, found) in gather(&grads) {
        let expected = fixture.reference.parameter(&source(&path), "grad.").unwrap();
        let relative = relative_distance(&found, &expected.try_to_vec::<f32>().unwrap());
        assert!(relative <= 1e-3, "the gradient of {path} differs by {relative}");
    }
}
