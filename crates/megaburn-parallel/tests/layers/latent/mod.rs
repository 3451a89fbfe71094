//! Multi-head latent attention computes what Hugging Face's DeepSeek computes, under every layout.

mod case;
mod reference;

use burn::{
    module::Module,
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::Layout;
use megaburn_parallel::{Attention, ContextComm, main_grads, recomputed};
use rstest::rstest;

use crate::{
    cached::{assert_goes_on, inputs},
    sequences::{Subject, check},
    support::{
        assert_bits, assert_close, autodiff, fresh_seed, leaf, normal, on_ranks, param_grads,
    },
};
use case::Case;

/// The output of a layer on random input, and all gradients.
fn found(
    layer: &Attention,
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
    let multiple = 2 * of.cp * if of.sp { of.tp } else { 1 };
    let heads = of.tp * of.cp;
    for case in [
        Case::even([multiple, 2], 2 * heads),
        Case::ragged([3 * multiple, 3], heads),
    ] {
        let q_rank = case.q_rank.filter(|_| with_latent);
        check(
            &Case {
                q_rank,
                again,
                ..case
            },
            layout,
            comm,
        );
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
    check(
        &Case {
            documents,
            ..Case::ragged([8 * chunk, 2], 2 * of.tp * of.cp)
        },
        layout,
        comm,
    );
}

#[rstest]
fn the_same_probabilities_drop(
    #[values("tp2-sp", "cp2", "tp2-cp2-sp")] layout: &str,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
    #[values(true, false)] again: bool,
) {
    let of: Layout = layout.parse().unwrap();
    let plain = Case::ragged([4 * of.cp * of.tp, 2], 2 * of.tp * of.cp);
    check(
        &Case {
            dropout: 0.3,
            again,
            ..plain
        },
        layout,
        comm,
    );
}

#[rstest]
fn ranks_that_share_tokens_may_be_named_with_them(
    #[values("cp2", "tp2-cp2-sp")] layout: &str,
    #[values(RING, GATHERED, HEADS)] comm: ContextComm,
) {
    check(
        &Case {
            told: true,
            ..Case::ragged([16, 2], 4)
        },
        layout,
        comm,
    );
}

/// Recomputes attention alone, and the full layer.
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
        let core = config
            .with_recompute(true)
            .init(&group, &autodiff())
            .unwrap();
        let core = found(&core, shape, seed, |x| core.forward(x, Some(&rope)));
        let all = found(&layer, shape, seed, |x| {
            let rope = rope.clone();
            let again =
                move |layer: &Attention, [x]: [Tensor<3>; 1]| [layer.forward(x, Some(&rope))];
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
    let seed = fresh_seed();
    let device = Device::flex();
    let inputs = inputs(seed, case.hidden);
    on_ranks(ranks, seed, |group| {
        let config = case.config().with_sequence_parallel(ranks > 1);
        let layer = config.init(&group, &device.clone().autodiff()).unwrap();
        let layer = layer.valid().whole_sequence();
        let inputs = inputs
            .clone()
            .map(|data| Tensor::<3>::from_data(data, &device));
        assert_goes_on(
            &inputs,
            |positions| Some(case.rope().init(positions, &device).unwrap()),
            |x, rope| layer.forward(x, rope),
            |x, rope, packed, cache| layer.forward_cached(x, rope, packed, cache),
        );
    });
}

/// The gradients of matrices that see only this rank's tokens are summed over ranks first, so these
/// have no main gradient.
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
            let expected = found(&layer, [len, 2, case.hidden], seed, |x| {
                layer.forward(x, Some(&rope))
            });
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
#[case(
    3,
    "MultiLatentAttention `blocks.0.attention`: 3 heads are not divisible by 2 tensor-parallel ranks"
)]
#[case(0, "0 heads are not divisible by 2 tensor-parallel ranks")]
fn heads_that_ranks_do_not_divide_are_refused(#[case] heads: usize, #[case] message: &str) {
    for error in on_ranks(2, 0, |group| {
        Case::ragged([4, 1], heads)
            .config()
            .init(&group, &autodiff())
            .unwrap_err()
            .to_string()
    }) {
        assert!(error.contains(message), "{error}");
    }
}
