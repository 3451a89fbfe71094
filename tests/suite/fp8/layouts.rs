//! Every layout trains as one rank does, with each recipe.

use rstest::rstest;

use super::support::{config, distances, train, train_in};

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
        (&["model.parts.init_std=0.020000001"][..], "tp1"),
        (&["model.parts.init_std=0.019999999"][..], "tp1"),
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
        (&["recompute.modules=[\"norm\", \"activation\", \"mlp\"]"], "tp2-sp"),
        (&["parallel.schedule=zb-h1"], "pp2"),
    ] {
        let started = std::time::Instant::now();
        let found = run(sets, layout);
        println!("{recipe} {layout} {sets:?} {:?} {:?}", distances(&found, &one), started.elapsed());
    }
    let long = ["data.seq_len=128"];
    let all = [&long[..], &[recipe_set.as_str()]].concat();
    let one = train(&config(dir.path(), &all, "tp1"), STEPS);
    let cp = config(dir.path(), &all, "cp2");
    println!("{recipe} cp2 {:?}", distances(&train(&cp, STEPS), &one));
    let omitted = train_in(&cp, STEPS, |groups| groups.tp_cp = groups.tp.clone());
    println!("{recipe} cp2 omitted {:?}", distances(&omitted, &one));
}
