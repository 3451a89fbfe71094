//! Every layout trains as one rank does, with each recipe.

use rstest::rstest;

use super::support::{config, distances, train};

const STEPS: usize = 3;

#[rstest]
fn every_layout_trains_with_the_scales_of_one_rank(
    #[values("tensorwise", "delayed", "blockwise", "mxfp8")] recipe: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let recipe_set = format!("precision.recipe={recipe}");
    let run = |sets: &[&str], layout: &str| {
        let all = [sets, &[recipe_set.as_str()]].concat();
        train(&config(dir.path(), &all, layout), STEPS)
    };
    let one = run(&[], "tp1");
    for (sets, layout) in [
        (&["optimizer.eps=1.0000001e-5"][..], "tp1"),
        (&[], "tp2"),
        (&[], "tp2-sp"),
        (&[], "tp2-dp2-sp"),
        (&[], "pp2"),
        (&[], "tp2-pp2-sp"),
        (&[], "dp2"),
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
        println!("{recipe} {layout} {sets:?} {:?}", distances(&found, &one));
    }
}
