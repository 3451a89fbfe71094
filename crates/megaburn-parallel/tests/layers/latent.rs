//! Multi-head latent attention: what Hugging Face's DeepSeek computes, under every layout.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, TensorData, activation},
};
use megaburn_collective::{Group, ProcessGroups};
use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling, YarnScaling};
use megaburn_mesh::{Documents, Layout};
use megaburn_parallel::{
    ContextComm, ContextParallel, MultiLatentAttention, MultiLatentAttentionConfig, ParallelError,
    TokenContext, load_params, main_grads, recomputed,
};
use rstest::rstest;

use crate::{
    cached::{assert_goes_on, inputs},
    sequences::{Subject, check},
    support::{
        assert_bits, assert_close, autodiff, fresh_seed, leaf, normal, on_ranks, param_grads,
    },
};

/// A layer and its sequences.
#[derive(Clone, Debug)]
struct Case {
    /// `[s, b]`.
    tokens: [usize; 2],
    hidden: usize,
    heads: usize,
    q_rank: Option<usize>,
    kv_rank: usize,
    /// Of queries and keys without positions, of those with them, and of values.
    dims: [usize; 3],
    yarn: Option<YarnScaling>,
    documents: Option<Vec<Vec<usize>>>,
    again: bool,
}

impl Case {
    /// Even numbers, of a head's queries and values alike.
    fn even(tokens: [usize; 2], heads: usize) -> Self {
        let (yarn, documents) = (Some(yarn()), None);
        let (q_rank, kv_rank, dims) = (Some(8), 12, [8, 4, 12]);
        Self { tokens, hidden: 16, heads, q_rank, kv_rank, dims, yarn, documents, again: false }
    }

    /// Odd ones.
    fn ragged(tokens: [usize; 2], heads: usize) -> Self {
        let (q_rank, kv_rank, dims) = (Some(7), 5, [3, 6, 5]);
        Self { hidden: 11, q_rank, kv_rank, dims, ..Self::even(tokens, heads) }
    }

    fn config(&self) -> MultiLatentAttentionConfig {
        let [nope, rope, values] = self.dims;
        let scale = self.yarn.as_ref().map(|yarn| self.scale() * yarn.score_factor());
        MultiLatentAttentionConfig::new(self.hidden, self.heads, self.kv_rank, nope, rope, values)
            .with_q_lora_rank(self.q_rank)
            .with_softmax_scale(scale)
            // Wide enough that the scores matter.
            .with_initializer(Initializer::Normal { mean: 0.0, std: 0.4 })
            .with_name("blocks.0.attention")
    }

    fn scale(&self) -> f64 {
        ((self.dims[0] + self.dims[1]) as f64).powf(-0.5)
    }
}

/// Longer by a half than what was trained on.
fn yarn() -> YarnScaling {
    YarnScaling::new(4.0, 16).with_mscale(Some(1.0)).with_mscale_all_dim(Some(0.6))
}

impl Subject for Case {
    type Layer = MultiLatentAttention;

    fn shape(&self) -> [usize; 3] {
        [self.tokens[0], self.tokens[1], self.hidden]
    }

    fn rope(&self) -> RopeConfig {
        RopeConfig::new(self.dims[1])
            .with_theta(50.0)
            .with_layout(RopeLayout::Interleaved)
            .with_scaling(self.yarn.clone().map_or(RopeScaling::None, RopeScaling::Yarn))
    }

    fn documents(&self) -> Option<Documents> {
        self.documents.clone().map(|rows| Documents::new(rows).unwrap())
    }

    fn layer(
        &self,
        groups: &ProcessGroups,
        comm: ContextComm,
    ) -> Result<MultiLatentAttention, ParallelError> {
        let config = self.config().with_sequence_parallel(groups.layout().sp);
        let parallel = ContextParallel::new(&groups.cp, comm)?;
        let layer = config.init(&groups.tp, &autodiff())?.with_recompute(self.again);
        with_gammas(layer, groups.tp.seed()).with_context_parallel(&parallel, "blocks.0.attention")
    }

    fn forward(layer: &MultiLatentAttention, x: Tensor<3>, context: &TokenContext) -> Tensor<3> {
        layer.forward_in(x, context)
    }
}

/// The layer with scales of norms that are not one, the same on all ranks.
fn with_gammas(layer: MultiLatentAttention, seed: u64) -> MultiLatentAttention {
    let start: std::collections::BTreeMap<_, _> =
        megaburn_parallel::read_params(&layer).into_iter().collect();
    let value = |path: &str, shape: &[usize]| {
        Ok::<_, std::convert::Infallible>(match path.ends_with("gamma") {
            true => normal(shape, seed, path),
            false => start[path].clone(),
        })
    };
    load_params(layer, value).unwrap()
}

/// Hugging Face's `DeepseekV3Attention`, line by line, of `x: [s, b, hidden]`.
fn reference(case: &Case, layer: &MultiLatentAttention, x: Tensor<3>) -> Tensor<3> {
    let [nope, rope, values] = case.dims;
    let ([s, b], h) = (case.tokens, case.heads);
    let linear = |x: Tensor<3>, weight: &burn::module::Param<Tensor<2>>| {
        x.matmul(weight.val().unsqueeze::<3>())
    };
    let norm = |x: Tensor<3>, gamma: &burn::module::Param<Tensor<1>>| {
        let variance = (x.clone() * x.clone()).mean_dim(2);
        x / (variance + 1e-6).sqrt() * gamma.val().unsqueeze::<3>()
    };
    let heads = |x: Tensor<3>, d: usize| x.reshape([b, s, h, d]).swap_dims(1, 2);
    let x = x.swap_dims(0, 1);

    let q = match (&layer.q_down, &layer.q_norm, &layer.q_up, &layer.q) {
        (None, None, None, Some(q)) => linear(x.clone(), &q.weight),
        (Some(down), Some(gamma), Some(up), None) => {
            linear(norm(linear(x.clone(), &down.weight), &gamma.gamma), &up.weight)
        }
        _ => panic!("a layer with and without a latent of queries"),
    };
    let q = heads(q, nope + rope);
    let (q_pass, q_rot) = (q.clone().narrow(3, 0, nope), q.narrow(3, nope, rope));
    let compressed = linear(x, &layer.kv_down.weight);
    let k_pass = compressed.clone().narrow(2, 0, case.kv_rank);
    let k_rot = compressed.narrow(2, case.kv_rank, rope).reshape([b, 1, s, rope]);
    let k_pass = linear(norm(k_pass, &layer.kv_norm.gamma), &layer.kv_up.weight);
    let k_pass = heads(k_pass, nope + values);
    let (k_pass, v) = (k_pass.clone().narrow(3, 0, nope), k_pass.narrow(3, nope, values));

    // `apply_rotary_pos_emb_interleave`
    let frequencies = case.rope().frequencies().unwrap();
    let factor = case.yarn.as_ref().map_or(1.0, YarnScaling::table_factor);
    let table = |of: fn(f64) -> f64| {
        let angles = (0..s).flat_map(|p| {
            let angles = frequencies.iter().chain(&frequencies).map(move |f| f * p as f64);
            angles.map(|angle| (of(angle) * factor) as f32).collect::<Vec<_>>()
        });
        let table = TensorData::new(angles.collect(), [1, 1, s, rope]);
        Tensor::<4>::from_data(table, &autodiff())
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let rotated = |x: Tensor<4>| {
        let [b, h, s, d] = x.dims();
        let x = x.reshape([b, h, s, d / 2, 2]).swap_dims(4, 3).reshape([b, h, s, d]);
        let (first, second) = (x.clone().narrow(3, 0, d / 2), x.clone().narrow(3, d / 2, d / 2));
        x * cos.clone() + Tensor::cat(vec![-second, first], 3) * sin.clone()
    };
    let q = Tensor::cat(vec![q_pass, rotated(q_rot)], 3);
    let k = Tensor::cat(vec![k_pass, rotated(k_rot).repeat_dim(1, h)], 3);

    // `eager_attention_forward`, causal
    let scaling = match &case.yarn {
        None => case.scale(),
        Some(yarn) => {
            let mscale = 0.1 * yarn.mscale_all_dim.unwrap() * yarn.factor.ln() + 1.0;
            case.scale() * mscale * mscale
        }
    };
    let hidden = (0..s).flat_map(|i| (0..s).map(move |j| if j > i { -1e30f32 } else { 0.0 }));
    let hidden = TensorData::new(hidden.collect(), [1, 1, s, s]);
    let scores = q.matmul(k.swap_dims(2, 3)) * scaling + Tensor::from_data(hidden, &autodiff());
    let attended = activation::softmax(scores, 3).matmul(v);
    let attended = attended.swap_dims(1, 2).reshape([b, s, h * values]);
    linear(attended, &layer.output.weight).swap_dims(0, 1)
}

/// What a layer makes of random input, and all gradients.
fn found(
    layer: &MultiLatentAttention,
    [s, b, hidden]: [usize; 3],
    seed: u64,
    forward: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Vec<(String, TensorData)> {
    let x = leaf::<3>(normal(&[s, b, hidden], seed, "input"));
    let y = forward(x.clone());
    let weight = Tensor::from_data(normal(&y.dims(), seed, "weight"), &autodiff());
    let grads = (y.clone() * weight).sum().backward();
    let mut all = param_grads(layer, &grads);
    all.push(("input".into(), x.grad(&grads).unwrap().into_data()));
    all.push(("output".into(), y.into_data()));
    all
}

#[rstest]
fn one_rank_computes_what_hugging_face_does(
    #[values(Case::even([8, 2], 4), Case::ragged([7, 3], 3), Case::ragged([41, 1], 5))] case: Case,
    #[values(true, false)] with_latent: bool,
    #[values(true, false)] with_yarn: bool,
) {
    let mut case = case;
    case.q_rank = case.q_rank.filter(|_| with_latent);
    case.yarn = case.yarn.filter(|_| with_yarn);
    let seed = fresh_seed();
    let layer = case.config().init(&Group::single(seed), &autodiff()).unwrap();
    let layer = with_gammas(layer, seed);
    let rope = case.rope().init(0..case.tokens[0], &autodiff()).unwrap();
    let ours = found(&layer, case.shape(), seed, |x| layer.forward(x, Some(&rope)));
    let theirs = found(&layer, case.shape(), seed, |x| reference(&case, &layer, x));
    assert_eq!(ours.len(), if with_latent { 9 } else { 7 });
    for ((path, ours), (_, theirs)) in ours.iter().zip(&theirs) {
        assert_close(&format!("{case:?}: {path}"), ours, theirs, 1e-5);
    }
}

const RING: ContextComm = ContextComm::P2p;
const GATHERED: ContextComm = ContextComm::AllGather;
const HEADS: ContextComm = ContextComm::A2a;
const BOTH: ContextComm = ContextComm::A2aP2p { low: 2 };

#[rstest]
#[case("tp2", RING)]
#[case("tp4", RING)]
#[case("tp2-sp", RING)]
#[case("tp4-sp", RING)]
#[case("cp2", RING)]
#[case("cp2", GATHERED)]
#[case("cp2", HEADS)]
#[case("cp4", BOTH)]
#[case("tp2-cp2", GATHERED)]
#[case("tp2-cp2-sp", RING)]
#[case("tp2-cp2-sp", GATHERED)]
#[case("tp2-cp2-sp", HEADS)]
fn ranks_compute_what_one_does(
    #[case] layout: &str,
    #[case] comm: ContextComm,
    #[values(true, false)] with_latent: bool,
    #[values(true, false)] again: bool,
) {
    let of: Layout = layout.parse().unwrap();
    let (multiple, heads) = (2 * of.cp * if of.sp { of.tp } else { 1 }, of.tp * of.cp);
    for case in [Case::even([multiple, 2], 2 * heads), Case::ragged([3 * multiple, 3], heads)] {
        let q_rank = case.q_rank.filter(|_| with_latent);
        check(&Case { q_rank, again, ..case }, layout, comm);
    }
}

#[rstest]
#[case("tp3", RING)]
#[case("tp3-sp", RING)]
fn any_length_is_split(#[case] layout: &str, #[case] comm: ContextComm) {
    check(&Case::ragged([9, 1], 3), layout, comm);
}

#[rstest]
#[case("tp2-sp", RING)]
#[case("cp2", RING)]
#[case("cp3", GATHERED)]
#[case("cp2", HEADS)]
#[case("cp4", BOTH)]
#[case("tp2-cp2-sp", RING)]
fn documents_do_not_see_each_other(#[case] layout: &str, #[case] comm: ContextComm) {
    let of: Layout = layout.parse().unwrap();
    let chunk = 2 * of.cp;
    let bounds = |ends: &[usize]| ends.iter().map(|end| end * chunk).collect();
    let documents = Some(vec![bounds(&[0, 1, 5, 5, 8]), bounds(&[0, 8])]);
    check(&Case { documents, ..Case::ragged([8 * chunk, 2], 2 * of.tp * of.cp) }, layout, comm);
}

/// Of attention itself, and of all of the layer.
#[rstest]
fn what_is_computed_again_changes_no_bit(
    #[values((1, false), (2, false), (2, true))] (ranks, sp): (usize, bool),
    #[values(Case::even([8, 2], 4), Case::ragged([6, 3], 2))] case: Case,
    #[values(true, false)] with_latent: bool,
) {
    let mut case = case;
    case.q_rank = case.q_rank.filter(|_| with_latent);
    let seed = fresh_seed();
    on_ranks(ranks, seed, |group| {
        let config = case.config().with_sequence_parallel(sp);
        let layer = config.init(&group, &autodiff()).unwrap();
        let rope = case.rope().init(0..case.tokens[0], &autodiff()).unwrap();
        let [s, b, hidden] = case.shape();
        let shape = [if sp { s / ranks } else { s }, b, hidden];
        let kept = found(&layer, shape, seed, |x| layer.forward(x, Some(&rope)));
        let core = layer.clone().with_recompute(true);
        let core = found(&core, shape, seed, |x| core.forward(x, Some(&rope)));
        let all = found(&layer, shape, seed, |x| {
            let rope = rope.clone();
            let again = move |layer: &MultiLatentAttention, [x]: [Tensor<3>; 1]| {
                [layer.forward(x, Some(&rope))]
            };
            let [y] = recomputed(&layer, [x.into()], again);
            y
        });
        for again in [core, all] {
            for ((path, again), (_, kept)) in again.iter().zip(&kept) {
                assert_bits(path, again, kept);
            }
        }
    });
}

#[rstest]
fn generation_goes_on_from_what_it_has_read(
    #[values(1, 2)] ranks: usize,
    #[values(Case::even([1, 1], 4), Case::ragged([1, 1], 2))] case: Case,
    #[values(true, false)] with_latent: bool,
) {
    let mut case = case;
    case.q_rank = case.q_rank.filter(|_| with_latent);
    let (seed, device) = (fresh_seed(), Device::flex());
    let inputs = inputs(seed, case.hidden);
    on_ranks(ranks, seed, |group| {
        let config = case.config().with_sequence_parallel(ranks > 1);
        let layer = config.init(&group, &device.clone().autodiff()).unwrap();
        let layer: MultiLatentAttention = layer.valid().whole_sequence();
        let inputs = inputs.clone().map(|data| Tensor::<3>::from_data(data, &device));
        assert_goes_on(
            &inputs,
            |positions| Some(case.rope().init(positions, &device).unwrap()),
            |x, rope| layer.forward(x, rope),
            |x, rope, packed, cache| layer.forward_cached(x, rope, packed, cache),
        );
    });
}

/// Of its matrices those that see this rank's tokens only have a gradient that is summed over ranks first.
#[rstest]
fn gradients_are_summed_where_they_are_computed(#[values(1, 2)] ranks: usize) {
    let case = Case::ragged([4, 2], 2);
    let seed = fresh_seed();
    for sequence_parallel in [false, true] {
        on_ranks(ranks, seed, |group| {
            let config = case.config().with_sequence_parallel(sequence_parallel);
            let layer = config.init(&group, &autodiff()).unwrap();
            let rope = case.rope().init(0..4, &autodiff()).unwrap();
            let len = if sequence_parallel { 4 / ranks } else { 4 };
            let expected =
                found(&layer, [len, 2, case.hidden], seed, |x| layer.forward(x, Some(&rope)));
            let main_grads = main_grads(&layer);
            let all = ["kv_down", "kv_up", "output", "q_down", "q_up"];
            let summed = all
                .into_iter()
                .filter(|path| !(sequence_parallel && ranks > 1 && path.ends_with("down")));
            let summed: Vec<_> = summed.map(|path| format!("{path}.weight")).collect();
            assert!(main_grads.keys().eq(&summed), "{:?}", main_grads.keys());
            main_grads.values().for_each(|main_grad| main_grad.attach());
            let x = leaf::<3>(normal(&[len, 2, case.hidden], seed, "input"));
            let y = layer.forward(x, Some(&rope));
            let weight = Tensor::from_data(normal(&y.dims(), seed, "weight"), &autodiff());
            (y * weight).sum().backward();
            for (path, main_grad) in main_grads {
                let found = main_grad.take().unwrap().into_data();
                let (_, expected) = expected.iter().find(|(other, _)| *other == path).unwrap();
                assert_close(&path, &found, expected, 1e-6);
            }
        });
    }
}

#[rstest]
#[case(3, "MultiLatentAttention `blocks.0.attention`: 3 heads do not divide over 2 ranks")]
#[case(0, "0 heads do not divide over 2 ranks")]
fn heads_that_ranks_do_not_divide_are_refused(#[case] heads: usize, #[case] message: &str) {
    for error in on_ranks(2, 0, |group| {
        Case::ragged([4, 1], heads).config().init(&group, &autodiff()).unwrap_err().to_string()
    }) {
        assert!(error.contains(message), "{error}");
    }
}
