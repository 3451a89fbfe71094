//! Runs a layer of experts forward and backward under a grid, and gathers everything into full
//! tensors.

use std::{collections::BTreeMap, ops::Range};

use burn::{
    module::Param,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_mesh::{Axis, Coords, Layout, ShardSpec, Zigzag};
use megaburn_parallel::{
    Activation, BatchContext, Capacity, Dispatcher, ExpertGroups, LoadBalance, LoadCounts, Moe,
    MoeConfig, MoeOptions, PrecisionScope, read_params, shard_plan,
};

use crate::support::{assert_close, autodiff, floats, join, leaf, normal, on_ranks, param_grads};

/// The results of a layer, as full tensors.
pub(crate) struct Done {
    pub(crate) start: BTreeMap<String, TensorData>,
    pub(crate) output: TensorData,
    pub(crate) input_grad: TensorData,
    pub(crate) grads: BTreeMap<String, TensorData>,
    pub(crate) load: LoadCounts,
}

/// A layer and its input, `[seq, batch, d_model]`.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) shape: [usize; 3],
    pub(crate) config: MoeConfig,
    pub(crate) balance: LoadBalance,
    pub(crate) capacity: Option<Capacity>,
    pub(crate) dispatcher: Dispatcher,
    /// Scale of a term that the inputs of all tokens have in common, so that the router prefers
    /// some experts.
    pub(crate) common: f32,
    pub(crate) recompute: bool,
    /// Whether the layer is one of a model, whose ranks share scales.
    pub(crate) in_scope: bool,
}

pub(crate) fn groups(world: &Group, layout: &str) -> (ProcessGroups, ExpertGroups) {
    let layout: Layout = layout.parse().unwrap();
    let groups = ProcessGroups::new(world, layout).unwrap();
    let experts = ExpertGroups::from(&groups);
    (groups, experts)
}

/// The tokens of each sequence, and the sequences, that a rank holds: chunks over cp, sharded along
/// the sequence over tp, and a share of the batch over dp.
fn held(layout: &Layout, at: Coords, [seq, batch]: [usize; 2]) -> (Vec<usize>, Range<usize>) {
    let of_cp: Vec<usize> = Zigzag::new(at.cp, layout.cp).positions(seq).collect();
    let len = of_cp.len() / layout.tp;
    let samples = batch / layout.dp;
    (
        of_cp[at.tp * len..][..len].to_vec(),
        at.dp * samples..(at.dp + 1) * samples,
    )
}

fn own(whole: &TensorData, groups: &ProcessGroups) -> Tensor<3> {
    let x = Tensor::<3>::from_data(whole.clone(), &autodiff().inner());
    let [seq, batch, _] = x.dims();
    let (tokens, samples) = held(&groups.layout(), groups.coords, [seq, batch]);
    let rows = tokens
        .iter()
        .map(|&at| x.clone().narrow(0, at, 1))
        .collect();
    Tensor::cat(rows, 0).narrow(1, samples.start, samples.len())
}

impl Case {
    pub(crate) fn new(shape: [usize; 3], config: MoeConfig) -> Self {
        let MoeOptions {
            balance,
            capacity,
            dispatcher,
            ..
        } = MoeOptions::default();
        Self {
            shape,
            config,
            balance,
            capacity,
            dispatcher,
            common: 0.0,
            recompute: false,
            in_scope: true,
        }
    }

    pub(crate) fn build(&self, groups: ExpertGroups) -> Moe {
        let config = self.config.clone().with_name("moe");
        let config = config.with_sequence_parallel(groups.tp.size() > 1);
        let Self {
            balance,
            capacity,
            dispatcher,
            ..
        } = *self;
        let options = MoeOptions {
            balance,
            capacity,
            dispatcher,
            ..MoeOptions::default()
        };
        let scope = PrecisionScope::new(groups.tp_cp.clone(), Zigzag::WHOLE);
        let moe = config
            .with_recompute(self.recompute)
            .init(groups, options, &autodiff())
            .unwrap();
        let moe = with_biases(moe);
        match self.in_scope {
            true => moe.in_scope(&scope),
            false => moe,
        }
    }

    pub(crate) fn input(&self, seed: u64) -> TensorData {
        let x = floats(&normal(&self.shape, seed, "input"));
        let d = self.shape[2];
        let same = floats(&normal(&[d], seed, "same"));
        let x = x
            .iter()
            .enumerate()
            .map(|(i, x)| x + self.common * same[i % d])
            .collect();
        TensorData::new::<f32, _>(x, self.shape)
    }

    pub(crate) fn run(&self, layout: &str, seed: u64) -> Done {
        let ranks = layout.parse::<Layout>().unwrap().world_size();
        let ranks = on_ranks(ranks, seed, |world| {
            let (groups, experts) = groups(&world, layout);
            let layer = self.build(experts);
            let plan = shard_plan(&layer).unwrap();
            let start: Vec<_> = read_params(&layer)
                .into_iter()
                .map(|(path, data)| (path.clone(), plan.get(&path).unwrap().shard.clone(), data))
                .collect();
            let x = leaf::<3>(own(&self.input(seed), &groups).into_data());
            let context = BatchContext {
                loss_factor: Some(1.0),
                ..BatchContext::default()
            };
            let y = layer.forward(x.clone(), &context);
            let weight = own(&normal(&self.shape, seed, "weight"), &groups);
            let grads = (y.clone() * Tensor::from_inner(weight)).sum().backward();
            let input_grad = x.grad(&grads).unwrap();
            let frozen = layer.router.bias.as_ref().map(|_| "router.bias");
            let grads: Vec<_> = param_grads_but(&layer, &grads, frozen)
                .into_iter()
                .map(|(path, data)| {
                    let spec = &plan.get(&path).unwrap().shard;
                    let copies = if spec.axis == Axis::Etp {
                        "edp"
                    } else {
                        "dp-cp"
                    };
                    (path.clone(), spec.clone(), copies, data)
                })
                .collect();
            let load = layer.router.load().take().unwrap();
            (groups.coords, start, y.inner(), input_grad, grads, load)
        });
        let whole = |pick: &dyn Fn(usize) -> Tensor<3>| {
            let mut whole = Tensor::<3>::zeros(self.shape, &autodiff().inner());
            let layout: Layout = layout.parse().unwrap();
            for (rank, done) in ranks.iter().enumerate() {
                let part = pick(rank);
                let [seq, batch, d] = self.shape;
                let (tokens, samples) = held(&layout, done.0, [seq, batch]);
                for (row, at) in tokens.into_iter().enumerate() {
                    let place = [at..at + 1, samples.clone(), 0..d];
                    whole = whole.slice_assign(place, part.clone().narrow(0, row, 1));
                }
            }
            whole.into_data()
        };
        let mut start: BTreeMap<String, Vec<(ShardSpec, TensorData)>> = BTreeMap::new();
        let mut sums: BTreeMap<(String, String), (ShardSpec, Tensor<1>)> = BTreeMap::new();
        let mut load = LoadCounts::default();
        for (coords, begins, _, _, grads, seen) in &ranks {
            for (path, spec, data) in begins {
                start
                    .entry(path.clone())
                    .or_default()
                    .push((spec.clone(), data.clone()));
            }
            for (path, spec, copies, data) in grads {
                // The gradient is the sum over replicas.
                let place = match *copies {
                    "edp" => format!("{}", coords.etp),
                    _ => format!("{}", coords.tp),
                };
                let data = data.clone();
                let flat = Tensor::<1>::from_data(
                    TensorData::new(floats(&data), [data.num_elements()]),
                    &autodiff().inner(),
                );
                let sum = sums.entry((path.clone(), place));
                sum.and_modify(|(_, sum)| *sum = sum.clone() + flat.clone())
                    .or_insert_with(|| (spec.clone(), flat));
            }
            add(&mut load, seen);
        }
        let mut grads: BTreeMap<String, Vec<(ShardSpec, TensorData)>> = BTreeMap::new();
        for ((path, _), (spec, sum)) in sums {
            let data = sum.into_data();
            let data = TensorData::new(floats(&data), spec.local_shape());
            grads.entry(path).or_default().push((spec, data));
        }
        let joined = |all: BTreeMap<String, Vec<(ShardSpec, TensorData)>>| {
            all.into_iter()
                .map(|(path, shards)| (path.clone(), join(&path, &shards)))
                .collect()
        };
        Done {
            start: joined(start),
            output: whole(&|rank| ranks[rank].2.clone()),
            input_grad: whole(&|rank| ranks[rank].3.clone()),
            grads: joined(grads),
            load,
        }
    }
}

/// Gives biases that start at zero other values, which are the same on all ranks.
fn with_biases(mut moe: Moe) -> Moe {
    let filled = |bias: Option<Param<Tensor<1>>>, value: f32| {
        let value = |x: Tensor<1>| (x.inner().zeros_like() + value).autodiff().require_grad();
        bias.map(|bias| Param::from_tensor(value(bias.val())))
    };
    for (index, expert) in moe.experts.iter_mut().enumerate() {
        if let Some(expert) = expert {
            expert.up.bias = filled(expert.up.bias.take(), 0.3 * index as f32 - 0.5);
            expert.down.bias = filled(expert.down.bias.take(), 0.4 - 0.2 * index as f32);
        }
    }
    moe.router.logit_bias = moe.router.logit_bias.take().map(|bias| {
        let values: Vec<f32> = (0..bias.dims()[0]).map(|i| (i as f32).sin()).collect();
        let values = Tensor::<1>::from_data(values.as_slice(), &autodiff());
        Param::from_tensor(values.require_grad())
    });
    moe
}

fn param_grads_but(
    layer: &Moe,
    grads: &burn::tensor::Gradients,
    frozen: Option<&str>,
) -> Vec<(String, TensorData)> {
    match frozen {
        None => param_grads(layer, grads),
        Some(_) => {
            let mut layer = layer.clone();
            layer.router.bias = None;
            param_grads(&layer, grads)
        }
    }
}

fn add(sum: &mut LoadCounts, term: &LoadCounts) {
    sum.tokens.resize(term.tokens.len(), 0);
    sum.tokens
        .iter_mut()
        .zip(&term.tokens)
        .for_each(|(sum, term)| *sum += term);
    sum.dropped += term.dropped;
    sum.aux_loss += term.aux_loss;
    sum.seq_aux_loss += term.seq_aux_loss;
    sum.z_loss += term.z_loss;
    sum.probabilities.resize(term.probabilities.len(), 0.0);
    sum.probabilities
        .iter_mut()
        .zip(&term.probabilities)
        .for_each(|(sum, term)| *sum += term);
}

pub(crate) fn assert_same(found: &Done, expected: &Done, tolerance: f64) {
    assert_close("output", &found.output, &expected.output, tolerance);
    assert_close(
        "input gradient",
        &found.input_grad,
        &expected.input_grad,
        tolerance,
    );
    assert_eq!(
        found.grads.keys().collect::<Vec<_>>(),
        expected.grads.keys().collect::<Vec<_>>()
    );
    for (path, start) in &expected.start {
        assert_eq!(floats(start), floats(&found.start[path]), "{path}");
    }
    for (path, grad) in &expected.grads {
        let found = floats(&found.grads[path]);
        let grad = floats(grad);
        // The gradients of an expert without tokens are zeros.
        let size = grad
            .iter()
            .fold(1e-3f64, |max, g| max.max(f64::from(g.abs())));
        for (a, b) in found.iter().zip(&grad) {
            let off = f64::from((a - b).abs());
            assert!(off <= tolerance * size, "{path}: {a} for {b} of {size}");
        }
    }
    assert_eq!(found.load.tokens, expected.load.tokens);
    assert_eq!(found.load.dropped, expected.load.dropped);
    let close = |what: &str, a: f64, b: f64| {
        assert!(
            (a - b).abs() <= tolerance * b.abs().max(1.0),
            "{what}: {a} for {b}"
        );
    };
    close("aux loss", found.load.aux_loss, expected.load.aux_loss);
    close(
        "sequence aux loss",
        found.load.seq_aux_loss,
        expected.load.seq_aux_loss,
    );
    close("z loss", found.load.z_loss, expected.load.z_loss);
    for (a, b) in found
        .load
        .probabilities
        .iter()
        .zip(&expected.load.probabilities)
    {
        close("probability", *a, *b);
    }
}

pub(crate) fn mixtral(d_model: usize, d_ffn: usize, experts: usize, top_k: usize) -> MoeConfig {
    use burn::nn::Initializer::Normal;
    let wide = Normal {
        mean: 0.0,
        std: 0.4,
    };
    MoeConfig::new(d_model, d_ffn, experts, top_k)
        .with_initializer(wide.clone())
        .with_output_initializer(wide)
}

pub(crate) fn deepseek(d_model: usize, d_ffn: usize) -> MoeConfig {
    mixtral(d_model, d_ffn, 8, 3)
        .with_sigmoid(true)
        .with_scale(2.5)
        .with_groups(Some([4, 2, 2]))
        .with_expert_bias(true)
        .with_shared_ffn(Some(2 * d_ffn))
}

pub(crate) fn qwen2(d_model: usize, d_ffn: usize) -> MoeConfig {
    mixtral(d_model, d_ffn, 8, 3)
        .with_normalise(false)
        .with_shared_ffn(Some(2 * d_ffn))
        .with_shared_gate(true)
}

pub(crate) fn gpt_oss(d_model: usize, d_ffn: usize) -> MoeConfig {
    mixtral(d_model, d_ffn, 8, 3)
        .with_activation(Activation::ClampedSwiGlu)
        .with_bias(true)
        .with_router_bias(true)
}
