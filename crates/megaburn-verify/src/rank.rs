use std::collections::BTreeMap;

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{DType, Tensor, kind::Basic},
};
use megaburn_collective::{ProcessGroups, ReduceOp};
use megaburn_mesh::{ShardPlan, ShardSpec, Zigzag};
use megaburn_models::{
    Decoder,
    decoder::{ModelOptions, MtpTargets, StageLosses},
};
use megaburn_optim::{GradientAccumulator, Optimizer};
use megaburn_parallel::{BatchContext, BlockObserver, BlockValues};
use megaburn_pipeline::{P2pSpec, run};
use megaburn_train::{
    Pipeline, TrainError, TrainState, TrainStateConfig,
    config::{Dtype, ParallelConfig},
    failure::read,
};

use crate::{decoder_inputs::IGNORED, executor::VerifyExecutor, reference::Reference};

/// The model and the samples of one rank.
pub(crate) struct VerifyRank<'a> {
    reference: &'a Reference,
    model: Decoder,
    grads: GradientAccumulator,
    optimizer: Optimizer,
    plan: ShardPlan,
    groups: ProcessGroups,
    pipeline: Pipeline,
    /// `[S, B / dp]` each; of an encoder-decoder model, tokens of both and labels of the decoder.
    tokens: Tensor<2, Int>,
    labels: Tensor<2, Int>,
    ahead: Vec<MtpTargets>,
    context: BatchContext,
    /// `[S, B / dp]`, 0 at padding; `None` without padding.
    unpadded: Option<Tensor<2, Int>>,
}

/// The results of a rank.
pub(crate) struct RankResult {
    /// Largest absolute difference from the reference's logits, if it has any.
    pub(crate) logits: Option<f64>,
    /// Path, local values and shard of each gradient.
    pub(crate) grads: Vec<(String, Vec<f32>, ShardSpec)>,
    /// For each step, before its update: the loss, then the loss of each multi-token-prediction
    /// depth.
    pub(crate) losses: Vec<Vec<f64>>,
}

/// This rank's part of `[B, S, ..]`, as `[S / cp, B / dp, ..]`.
pub(crate) fn share<const D: usize, K: Basic>(
    all: Tensor<D, K>,
    groups: &ProcessGroups,
) -> Tensor<D, K> {
    let samples = all.dims()[0] / groups.dp.size();
    let all = all
        .narrow(0, groups.dp.rank() * samples, samples)
        .swap_dims(0, 1);
    let zigzag = Zigzag::new(groups.cp.rank(), groups.cp.size());
    let chunks = zigzag.ranges(all.dims()[0]);
    let chunks = chunks.map(|range| all.clone().narrow(0, range.start, range.len()));
    Tensor::cat(chunks.to_vec(), 0)
}

impl<'a> VerifyRank<'a> {
    pub(crate) fn new(
        reference: &'a Reference,
        groups: ProcessGroups,
        dtype: Dtype,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let source = &reference.source;
        let layout = groups.layout();
        // All gradients are compared, so none is sharded.
        let parallel = ParallelConfig {
            overlap: false,
            ..ParallelConfig::default()
        };
        let TrainState {
            pipeline,
            model,
            plan,
            grads,
            optimizer,
            ..
        } = TrainStateConfig {
            model: source.config(),
            options: ModelOptions {
                sequence_parallel: layout.sp,
                cp_comm: vec![reference.comm(&layout)],
                ..ModelOptions::default()
            },
            parallel: &parallel,
            optimizer: &reference.optimizer.config(),
            dtype,
            weights: Some(source),
        }
        .init(&groups, device)?;
        let [tokens, labels] = reference
            .batch(&device.clone().inner())
            .map(|all| share(all, &groups));
        let of_depth = |[tokens, labels]: [Tensor<2, Int>; 2]| {
            let [tokens, labels] = [tokens, labels].map(|all| share(all, &groups));
            MtpTargets {
                tokens,
                labels,
                counted: None,
            }
        };
        let ahead = reference
            .ahead(&device.clone().inner())
            .into_iter()
            .map(of_depth)
            .collect();
        let rows = reference.num_rows() / groups.dp.size();
        let own = groups.dp.rank() * rows..(groups.dp.rank() + 1) * rows;
        let inner = device.clone().inner();
        Ok(Self {
            context: reference.context(own, &inner)?,
            unpadded: reference.unpadded(&inner).map(|all| share(all, &groups)),
            reference,
            model,
            grads,
            optimizer,
            plan,
            groups,
            pipeline,
            tokens,
            labels,
            ahead,
        })
    }

    /// Compares the logits, then trains on the batch for as many steps as the reference.
    pub(crate) fn run(mut self) -> Result<RankResult, TrainError> {
        let logits = self.logits_difference()?;
        let steps = self
            .reference
            .numbers("train_losses")?
            .map_or(1, |losses| losses.len());
        let mut first = None;
        let mut losses = Vec::new();
        for _ in 0..steps.max(1) {
            losses.push(self.backward()?);
            first.get_or_insert_with(|| self.local());
            if let Some(max_norm) = self.reference.optimizer.clip {
                let norm = self.grads.norm()?;
                self.grads.clip(&norm, max_norm);
            }
            let lr = self.reference.optimizer.lr;
            self.model = self.optimizer.step(lr, self.model, &self.grads)?;
        }
        Ok(RankResult {
            logits,
            grads: first.expect("there is at least one step"),
            losses,
        })
    }

    /// What each block of this rank computes: its output, and the gradient of its output.
    pub(crate) fn blocks(mut self) -> Result<BTreeMap<Option<usize>, BlockValues>, TrainError> {
        let observer = BlockObserver::default();
        self.context.observer = Some(observer.clone());
        self.backward()?;
        Ok(observer.take())
    }

    fn logits_difference(&self) -> Result<Option<f64>, TrainError> {
        if !self.reference.tensors.contains("logits") {
            return Ok(None);
        }
        let expected = self.reference.tensors.read("logits")?.convert::<f32>();
        let expected = Tensor::<3>::from_data(expected, &self.tokens.device());
        let schedule = self.pipeline.forward_only(1)?;
        let model = self.model.valid();
        let mut pass = VerifyExecutor::new(&model, &self.tokens, None);
        pass.context = self.context.clone();
        run(&schedule, &self.p2p_spec(), &mut pass)?;
        // The logits are on another stage.
        let Some(found) = pass.logits else {
            return Ok(Some(0.0));
        };
        let found = found.cast(DType::F32);
        let mut differences = (found - share(expected, &self.groups)).abs();
        // Transformers lets padding see the other tokens; nothing reads the result.
        if let Some(unpadded) = &self.unpadded {
            differences = differences * unpadded.clone().float().unsqueeze_dim(2);
        }
        let differences = differences.into_data();
        let differences: Vec<f32> = differences.try_to_vec().expect("the values are f32");
        // `max` would ignore a NaN.
        let worst = differences.into_iter().fold(0.0f32, |worst, difference| {
            if difference.is_nan() {
                f32::INFINITY
            } else {
                worst.max(difference)
            }
        });
        Ok(Some(worst.into()))
    }

    /// Computes the gradients into `grads` and returns the mean losses.
    fn backward(&mut self) -> Result<Vec<f64>, TrainError> {
        self.grads.reset();
        let schedule = self.pipeline.training(1)?;
        let spec = self.p2p_spec();
        let mut pass = VerifyExecutor::new(&self.model, &self.tokens, Some(&self.labels));
        pass.ahead = &self.ahead;
        pass.context = self.context.clone();
        pass.binary_factor = self.reference.labels_per_row();
        pass.scaling_factor = self.reference.mtp_loss_scaling_factor;
        pass.grads = Some(&mut self.grads);
        run(&schedule, &spec, &mut pass)?;
        let mut mine = vec![0.0; 3 + self.ahead.len()];
        if let Some(StageLosses { main, mtp, binary }) = pass.losses {
            let labels = self.labels.to_data();
            mine[0] = labels
                .iter::<i64>()
                .filter(|&label| label != IGNORED)
                .count() as f64;
            if let Some(binary) = binary {
                mine[1] = read(binary)?;
            }
            for (sum, loss) in mine[2..].iter_mut().zip([main].into_iter().chain(mtp)) {
                *sum = read(loss)?;
            }
        }
        let all = self
            .groups
            .batch
            .all_reduce(mine[..].into(), ReduceOp::Sum)?;
        let all: Vec<f64> = all.try_to_vec().expect("the tensor is f64");
        self.grads.reduce()?;
        self.pipeline.all_reduce_tied(&mut self.grads)?;
        self.grads.scale(1.0 / all[0]);
        let mut means: Vec<f64> = all[2..].iter().map(|sum| sum / all[0]).collect();
        // Transformers adds the mean over rows to the mean over tokens.
        means[0] += all[1] / self.reference.num_rows() as f64;
        Ok(means)
    }

    fn p2p_spec(&self) -> P2pSpec {
        let [len, samples] = self.tokens.dims();
        self.pipeline.p2p_spec(
            [len * self.groups.cp.size(), samples],
            &self.tokens.device(),
        )
    }

    fn local(&self) -> Vec<(String, Vec<f32>, ShardSpec)> {
        let local = |path| {
            self.grads
                .get(path)
                .expect("every parameter has a gradient")
                .into_data()
        };
        let all = self
            .plan
            .iter()
            .filter(|(path, _)| !self.reference.source.is_buffer(path));
        all.map(|(path, spec)| {
            let values = local(path).try_to_vec().expect("gradients are f32");
            (path.to_string(), values, spec.shard.clone())
        })
        .collect()
    }
}
