//! Every layout trains as one rank does, with each recipe.

use std::path::Path;

use megaburn::collective::ProcessGroups;
use megaburn_test_support::gather::relative_distance;
use rstest::rstest;

use super::support::{config, distances, numbers};
use crate::layouts::grid::{Trained, train_in};

/// Three steps of a run with a recipe.
fn trained(
    dir: &Path,
    (recipe, sets): (&str, &[&str]),
    layout: &str,
    change: impl Fn(&mut ProcessGroups) + Sync,
) -> Trained {
    let recipe = format!("precision.recipe={recipe}");
    let sets = [sets, &[recipe.as_str(), "train.steps=3"]].concat();
    let config = config(dir, &sets, layout);
    let layout = config.layout(None).unwrap();
    train_in(config, layout, change)
}

/// The largest relative differences of losses, of the gradient norms of three steps, and of the
/// gradients of a parameter in the first step.
fn compared(found: &Trained, expected: &Trained) -> [f64; 3] {
    let [losses, norms] = distances(&numbers(&found.steps), &numbers(&expected.steps));
    assert!(found.grads.keys().eq(expected.grads.keys()));
    let pairs = found.grads.values().zip(expected.grads.values());
    let grads = pairs.map(|(a, b)| relative_distance(a, b));
    [losses, norms, grads.fold(0.0, f64::max)]
}

/// Bounds of [`compared`].
///
/// Layouts sum in different orders, by which numbers differ by about 1e-7. Where one is that close to
/// the middle of two FP8 numbers it is rounded the other way, which changes it by 1/16 or 1/8. One rank
/// with initial weights that differ in their last bit differs by up to 5.2e-6, 1.1e-3 and 1.6e-2 from
/// itself, and layouts by up to 5.0e-6, 1.4e-3 and 8.9e-3. Scales that ranks do not share change all
/// numbers of a matrix: the gradients then differ by 8.6e-2, about as much as those of bf16 (9.5e-2).
const BOUNDS: [f64; 3] = [2e-5, 4e-3, 3e-2];

/// The bound of losses with NVFP4, where a number that is rounded the other way changes by up to 1/2.
/// Layouts differ by up to 2.8e-5.
const NVFP4_LOSS: f64 = 2e-4;

fn assert_same(found: &Trained, expected: &Trained, what: &str) {
    let found = compared(found, expected);
    let [loss, norm, grad] = BOUNDS;
    let loss = match what.starts_with("nvfp4") {
        true => NVFP4_LOSS,
        false => loss,
    };
    let bounds = [loss, norm, grad];
    let is_close = found
        .iter()
        .zip(bounds)
        .all(|(found, bound)| *found <= bound);
    assert!(is_close, "{what}: {found:?}");
}

fn same(_: &mut ProcessGroups) {}

#[rstest]
fn every_layout_trains_with_the_scales_of_one_rank(
    #[values("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")] recipe: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let run = |sets: &[&str], layout: &str| trained(dir.path(), (recipe, sets), layout, same);
    let one = run(&[], "tp1");
    let bf16 = compared(&trained(dir.path(), ("bf16", &[]), "tp1", same), &one);
    assert!(bf16[2] > 2.0 * BOUNDS[2], "nothing was quantised: {bf16:?}");
    for (sets, layout) in [
        (&[][..], "tp2"),
        (&[], "tp2-sp"),
        (&[], "tp2-pp2-sp"),
        (&["parallel.zero=1"], "dp2"),
        (&["parallel.zero=2"], "tp2-dp2-sp"),
        (&["parallel.zero=3"], "dp2"),
        (&["recompute.method=uniform"], "tp2-sp"),
        (
            &["recompute.modules=[\"norm\", \"activation\", \"mlp\"]"],
            "tp2-sp",
        ),
        (&["parallel.schedule=zb-h1"], "pp2"),
    ] {
        let what = format!("{recipe}, {layout}, {sets:?}");
        assert_same(&run(sets, layout), &one, &what);
    }
    let long = &["data.seq_len=128"];
    assert_same(
        &run(long, "cp2"),
        &run(long, "tp1"),
        &format!("{recipe}, cp2"),
    );
    if recipe != "blockwise" {
        let heads = &["model.heads=4", "model.kv_heads=4", "model.head_dim=32"];
        let what = format!("{recipe}, tp4-dp2-sp");
        assert_same(&run(heads, "tp4-dp2-sp"), &run(heads, "tp1"), &what);
    }
}

/// The tokens of an expert have one scale, whichever ranks they are on.
#[rstest]
fn quantised_experts_train_with_the_scales_of_one_rank(
    #[values("tensorwise", "delayed")] recipe: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let experts = [
        "model.family=mixtral",
        "model.experts.num=4",
        "model.experts.top_k=2",
        "model.experts.ffn=64",
    ];
    let run = |sets: &[&str], layout: &str| {
        let sets = [&experts, sets].concat();
        trained(dir.path(), (recipe, &sets), layout, same)
    };
    let one = run(&[], "tp1");
    let plain = run(&["precision.experts_in_bf16=true"], "tp1");
    let off = compared(&plain, &one);
    assert!(
        off[2] > 2.0 * BOUNDS[2],
        "experts are not quantised: {off:?}"
    );
    for (sets, layout) in [
        (&["parallel.zero=3"][..], "tp2-sp"),
        (&["recompute.modules=[\"activation\"]"], "tp2-ep2-sp"),
        (&["recompute.method=uniform"], "tp2-etp2-sp"),
        (&["parallel.zero=1"], "tp2-dp2-ep2-sp"),
    ] {
        let what = format!("{recipe}, {layout}, {sets:?}");
        assert_same(&run(sets, layout), &one, &what);
    }
}

/// Planted omission: context-parallel ranks that do not share the scales of tokens. The layers' own
/// tests plant one for tensor-parallel ranks.
#[rstest]
fn scales_of_tokens_that_ranks_do_not_share_are_caught(
    #[values("tensorwise", "delayed")] recipe: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let long = &["data.seq_len=128"];
    let one = trained(dir.path(), (recipe, long), "tp1", same);
    let apart = trained(dir.path(), (recipe, long), "cp2", |groups| {
        groups.tp_cp = groups.tp.clone();
    });
    let found = compared(&apart, &one);
    assert!(found[2] > 2.0 * BOUNDS[2], "{found:?}");
}
