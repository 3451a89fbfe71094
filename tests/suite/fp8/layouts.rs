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

#[rstest]
fn every_layout_trains_with_the_scales_of_one_rank(
    #[values("tensorwise", "delayed", "blockwise", "mxfp8")] recipe: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let same = |_: &mut ProcessGroups| {};
    let run = |sets: &[&str], layout: &str| trained(dir.path(), (recipe, sets), layout, same);
    let one = run(&[], "tp1");
    println!(
        "{recipe} bf16 {:?}",
        compared(&trained(dir.path(), ("bf16", &[]), "tp1", same), &one)
    );
    for (sets, layout) in [
        (&["model.parts.init_std=0.020000001"][..], "tp1"),
        (&[], "tp2"),
        (&[], "tp2-sp"),
        (&[], "tp2-dp2-sp"),
        (&[], "pp2"),
        (&[], "tp2-pp2-sp"),
        (&["parallel.zero=1"], "dp2"),
        (&["parallel.zero=2"], "dp2"),
        (&["parallel.zero=3"], "dp2"),
        (&["recompute.method=uniform"], "tp2-sp"),
        (
            &["recompute.modules=[\"norm\", \"activation\", \"mlp\"]"],
            "tp2-sp",
        ),
        (&["parallel.schedule=zb-h1"], "pp2"),
    ] {
        let found = run(sets, layout);
        println!("{recipe} {layout} {sets:?} {:?}", compared(&found, &one));
    }
    let long = &["data.seq_len=128"];
    let one = run(long, "tp1");
    println!("{recipe} cp2 {:?}", compared(&run(long, "cp2"), &one));
    let apart = trained(dir.path(), (recipe, long), "cp2", |groups| {
        groups.tp_cp = groups.tp.clone();
    });
    println!("{recipe} cp2 omitted {:?}", compared(&apart, &one));
    let std = &["data.seq_len=128", "model.parts.init_std=0.020000001"];
    println!("{recipe} noise {:?}", compared(&run(std, "tp1"), &one));
}
