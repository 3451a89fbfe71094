//! Routed experts that multiply quantised matrices, against one rank.

use megaburn_kernels::{QuantizationRecipe, Scaling, SmallFloat};
use megaburn_parallel::{Dispatcher, LinearPrecision, quantized_layers};
use rstest::rstest;

use super::case::{Case, Done, assert_same, deepseek, gpt_oss, groups, mixtral};
use crate::support::{floats, on_ranks};

fn precision(scaling: Scaling) -> LinearPrecision {
    LinearPrecision::new(QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    })
}

fn case(delayed: bool) -> Case {
    let precision = precision(Scaling::Tensor).with_delayed(delayed);
    let config = mixtral(16, 12, 4, 2).with_expert_precision(Some(precision));
    Case {
        common: 0.7,
        ..Case::new([8, 4, 16], config)
    }
}

/// The largest distance of a gradient of an expert, relative to its largest element.
fn distance(found: &Done, expected: &Done) -> f32 {
    let of = |path: &String| {
        let [a, b] = [found, expected].map(|done| floats(&done.grads[path]));
        let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
        off.fold(0.0, f32::max) / b.iter().fold(1e-3, |most: f32, x| most.max(x.abs()))
    };
    let experts = expected
        .grads
        .keys()
        .filter(|path| path.contains("experts"));
    experts.map(of).fold(0.0, f32::max)
}

/// Between the two matrices a number that is close to the middle of two FP8 numbers may be rounded
/// the other way, hence the tolerance; scales that are not shared differ by far more.
const TOLERANCE: f64 = 1e-2;

/// All tokens of an expert have one scale, wherever they are: on the ranks that split the sequence,
/// on those that split the experts or an expert's matrices, and on those with other samples that
/// send tokens to one expert.
#[rstest]
fn quantised_experts_have_the_scales_of_one_rank(
    #[values(
        "tp2-sp",
        "cp2",
        "tp2-ep2-sp",
        "tp2-etp2-sp",
        "cp2-ep2",
        "dp2-ep2",
        "dp2-etp2",
        "tp2-cp2-ep2-sp",
        "tp2-cp2-etp2-sp",
        "tp2-dp2-ep4-sp",
        "tp2-dp2-ep2-etp2-sp"
    )]
    layout: &str,
    #[values(false, true)] delayed: bool,
) {
    let case = case(delayed);
    let one = case.run("tp1", 5);
    assert_same(&case.run(layout, 5), &one, TOLERANCE);
    let plain = Case {
        config: case.config.clone().with_expert_precision(None),
        ..case
    };
    let off = distance(&plain.run("tp1", 5), &one);
    assert!(off > 3.0 * TOLERANCE as f32, "nothing was quantised: {off}");
}

#[rstest]
#[case(deepseek(16, 8), Dispatcher::AllToAll, false)]
#[case(deepseek(16, 8), Dispatcher::AllGather, true)]
#[case(gpt_oss(16, 8), Dispatcher::AllToAll, true)]
fn quantised_experts_of_other_layers_too(
    #[case] config: megaburn_parallel::MoeConfig,
    #[case] dispatcher: Dispatcher,
    #[case] recompute: bool,
) {
    let of = Some(precision(Scaling::Tensor));
    let config = config.with_expert_precision(of).with_precision(of);
    let case = Case {
        dispatcher,
        recompute,
        ..Case::new([6, 2, 16], config)
    };
    let one = case.run("tp1", 7);
    assert_same(&case.run("tp2-ep2-sp", 7), &one, TOLERANCE);
}

/// Blocks of an expert's tokens are those of one rank if they are in the order of the sequence.
#[rstest]
fn blocks_of_tokens_are_those_of_one_rank(
    #[values("tp2-ep2-sp", "tp2-etp2-sp", "tp4-ep2-etp2-sp")] layout: &str,
) {
    let of = Some(precision(Scaling::Microscaling));
    let config = mixtral(32, 64, 4, 2).with_expert_precision(of);
    let case = Case::new([32, 4, 32], config);
    let one = case.run("tp1", 5);
    assert_same(&case.run(layout, 5), &one, TOLERANCE);
}

/// Planted omission: ranks that split the sequence and derive scales from their own tokens.
#[test]
fn scales_of_experts_that_ranks_do_not_share_are_caught() {
    let case = case(false);
    let apart = Case {
        in_scope: false,
        ..case.clone()
    };
    let one = case.run("tp1", 5);
    let off = distance(&apart.run("tp2-sp", 5), &one);
    assert!(off > 2.0 * TOLERANCE as f32, "{off}");
}

/// Each rank has its own experts, under their names; generation quantises none.
#[test]
fn quantised_layers_have_the_names_of_experts() {
    let case = case(true);
    let names = on_ranks(2, 3, |world| {
        let layer = case.build(groups(&world, "tp2-ep2-sp").1);
        assert!(quantized_layers(&layer.clone().whole_sequence()).is_empty());
        quantized_layers(&layer).into_keys().collect::<Vec<_>>()
    });
    assert_eq!(names[1].len(), 2 * 2);
    assert_eq!(names[1][0], "experts.2.down");
}
