//! Recipes that change in a run, layers that fall back, and what is measured of them.

use megaburn::{
    report::metrics::{LayerQuantization, MatrixQuantization, PrecisionMetrics, StepMetrics},
    train::TrainError,
};
use rstest::rstest;

use super::support::{config, numbers, on_trainers};

/// The steps of a run from its beginning to `num`. If `saved` is given, a second trainer resumes after
/// that step, perhaps under another layout.
fn steps(sets: &[&str], layout: &str, num: usize, saved: Option<usize>) -> Vec<StepMetrics> {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), sets, layout);
    let first = saved.unwrap_or(num);
    let mut all = on_trainers(&config, |mut trainer| {
        let steps = (0..first).map(|_| trainer.step());
        let steps = steps.collect::<Result<Vec<_>, TrainError>>()?;
        trainer.save()?;
        Ok(steps)
    })
    .swap_remove(0);
    if saved.is_some() {
        let rest = on_trainers(&config, |mut trainer| {
            trainer.resume()?.expect("there is a checkpoint");
            let steps = (first..num).map(|_| trainer.step());
            steps.collect::<Result<Vec<_>, TrainError>>()
        });
        all.extend(rest.into_iter().next().unwrap());
    }
    all
}

fn precisions(steps: &[StepMetrics]) -> Vec<Option<PrecisionMetrics>> {
    steps.iter().map(|step| step.precision.clone()).collect()
}

fn schedule(phases: &[(u64, &str)]) -> String {
    let phase = |(from, recipe): &(u64, &str)| format!("{{from_step={from},recipe=\"{recipe}\"}}");
    let phases: Vec<String> = phases.iter().map(phase).collect();
    format!("precision.schedule=[{}]", phases.join(","))
}

/// A phase computes what a run with its recipe does, from its first step on.
#[test]
fn each_phase_computes_with_its_recipe() {
    let bf16 = numbers(&steps(&[], "tp1", 3, None));
    let of = |phases: &[(u64, &str)], recipe: &str| {
        let recipe = format!("precision.recipe={recipe}");
        steps(&[&recipe, &schedule(phases)], "tp1", 4, None)
    };
    let tensorwise = of(&[(3, "tensorwise"), (4, "bf16")], "bf16");
    let recipes: Vec<_> = precisions(&tensorwise)
        .into_iter()
        .map(|it| it.unwrap().recipe)
        .collect();
    assert_eq!(recipes, ["bf16", "bf16", "tensorwise", "bf16"]);
    let tensorwise = numbers(&tensorwise);
    assert_eq!(tensorwise[..2], bf16[..2]);
    assert_ne!(tensorwise[2], bf16[2]);
    // The first step of delayed scaling follows its own matrices, also after an earlier phase of it.
    let delayed = numbers(&of(&[(2, "bf16"), (3, "delayed")], "delayed"));
    let after_one = numbers(&of(&[(2, "bf16"), (3, "tensorwise")], "tensorwise"));
    assert_eq!(delayed[..3], after_one[..3]);
    assert_ne!(delayed[3], after_one[3]);
    // A run that ends in bf16 begins as if it did not.
    let healed = numbers(&of(&[(3, "bf16")], "tensorwise"));
    let whole = numbers(&steps(&["precision.recipe=tensorwise"], "tp1", 3, None));
    assert_eq!(healed[..2], whole[..2]);
    assert_ne!(healed[2], whole[2]);
}

/// Phases, histories and layers that fall back are those of an uninterrupted run.
#[rstest]
fn a_resumed_run_is_the_uninterrupted_one_to_the_bit(#[values("tp1", "tp2-pp2-sp")] layout: &str) {
    let schedule = schedule(&[(3, "delayed"), (8, "bf16")]);
    let sets = [
        schedule.as_str(),
        "precision.fallback.max_saturated_share=0",
        "precision.fallback.interval=1",
        "precision.fallback.duration_steps=2",
        "precision.log_interval=2",
    ];
    let expected = steps(&sets, layout, 8, None);
    let fell_back = |step: &StepMetrics| !step.precision.as_ref().unwrap().fallbacks.is_empty();
    let fallbacks: Vec<_> = expected.iter().map(fell_back).collect();
    // The first step of delayed scaling loses nothing; in the next one magnitudes grow.
    assert_eq!(fallbacks[..4], [false, false, false, true]);
    // Nothing falls back after the last step of a phase, which ends all fall-backs.
    let ended = |step: &StepMetrics| step.precision.as_ref().unwrap().ended_fallbacks.len();
    assert!(!fallbacks[6] && ended(&expected[6]) > 0 && ended(&expected[7]) == 0);
    // At the change of the recipe, where layers begin to fall back, and while they do.
    for saved in [2, 4, 5] {
        let found = steps(&sets, layout, 8, Some(saved));
        assert_eq!(numbers(&found), numbers(&expected));
        assert_eq!(precisions(&found), precisions(&expected));
    }
}

/// What a layer that falls back computes is neither quantised nor measured, until its time is over.
#[test]
fn a_layer_that_saturates_falls_back_and_returns() {
    let sets = [
        "precision.recipe=delayed",
        "precision.amax_compute=most_recent",
        "precision.fallback.max_saturated_share=0",
        "precision.fallback.interval=1",
        "precision.fallback.duration_steps=2",
        "precision.log_interval=1",
    ];
    let steps = precisions(&steps(&sets, "tp1", 6, None));
    let steps: Vec<_> = steps.into_iter().map(Option::unwrap).collect();
    assert_eq!(steps[0].layers.len(), 2 * 4);
    assert!(steps[0].fallbacks.is_empty());
    let begun = &steps[1].fallbacks;
    assert!(!begun.is_empty());
    for fallback in begun {
        let layer = fallback.layer.as_str();
        assert_eq!(
            (fallback.cause.as_str(), fallback.until_step),
            ("saturated", 4)
        );
        let measured: Vec<_> = steps
            .iter()
            .map(|step| step.layers.contains_key(layer))
            .collect();
        assert_eq!(measured[..5], [true, true, false, false, true], "{layer}");
        let share = |found: &Option<MatrixQuantization>| found.as_ref().unwrap().saturated;
        let LayerQuantization {
            input,
            weight,
            gradient,
        } = &steps[1].layers[layer];
        let largest = [input, weight, gradient]
            .map(share)
            .into_iter()
            .fold(0.0, f64::max);
        assert_eq!(fallback.value, largest);
        assert!(steps[3].ended_fallbacks.contains(&fallback.layer));
        // The second time is twice as long.
        let again = steps[5].fallbacks.iter().find(|again| again.layer == layer);
        assert!(again.is_none_or(|again| again.until_step == 6 + 4));
    }
}

/// Measurements for `metrics.jsonl` decide nothing: only those of `precision.fallback.interval` do. A step
/// without an update decides too, if it is finite.
#[test]
fn only_the_interval_of_fallbacks_decides() {
    let run = |sets: &[&str]| {
        let fallback = [
            "precision.recipe=mxfp8",
            "precision.fallback.max_underflow_share=0",
            "precision.fallback.interval=2",
            "precision.fallback.duration_steps=1",
        ];
        steps(&[&fallback, sets].concat(), "tp1", 4, None)
    };
    let fallbacks = |steps: &[StepMetrics]| {
        let of = |it: Option<PrecisionMetrics>| it.unwrap().fallbacks;
        precisions(steps).into_iter().map(of).collect::<Vec<_>>()
    };
    let rare = run(&[]);
    let has_any: Vec<bool> = fallbacks(&rare).iter().map(|it| !it.is_empty()).collect();
    assert_eq!(has_any, [false, true, false, true]);
    let often = run(&["precision.log_interval=1"]);
    assert_eq!(numbers(&often), numbers(&rare));
    assert_eq!(fallbacks(&often), fallbacks(&rare));
    let skipped = run(&["optimizer.grad_norm_skip_threshold=1e-9"]);
    assert!(skipped.iter().all(|step| step.skipped));
    assert!(!fallbacks(&skipped)[1].is_empty());
}

/// The largest differences of shares, and of magnitudes relative to one rank's.
fn distance(found: &PrecisionMetrics, expected: &PrecisionMetrics) -> [f64; 2] {
    assert!(found.layers.keys().eq(expected.layers.keys()));
    let mut largest = [0.0f64; 2];
    for (found, expected) in found.layers.values().zip(expected.layers.values()) {
        for (found, expected) in [
            (&found.input, &expected.input),
            (&found.weight, &expected.weight),
            (&found.gradient, &expected.gradient),
        ] {
            let [found, expected] = [found, expected].map(|it| it.as_ref().unwrap());
            let saturated = (found.saturated - expected.saturated).abs();
            let underflowed = (found.underflowed - expected.underflowed).abs();
            let amax = (found.amax / expected.amax - 1.0).abs();
            largest[0] = largest[0].max(saturated).max(underflowed);
            largest[1] = largest[1].max(amax);
        }
    }
    largest
}

/// Every layout measures what one rank does, and a measurement changes no number. With a margin of 13
/// many elements underflow.
#[rstest]
fn every_layout_measures_what_one_rank_does(#[values("delayed", "mxfp8")] recipe: &str) {
    let recipe = format!("precision.recipe={recipe}");
    let recipe = [recipe.as_str(), "precision.margin=13"];
    let measured = |sets: &[&str], layout: &str| {
        let sets = [&recipe, &["precision.log_interval=2"][..], sets].concat();
        steps(&sets, layout, 2, None)
    };
    let plain = numbers(&steps(&recipe, "tp1", 2, None));
    let one = measured(&[], "tp1");
    assert_eq!(numbers(&one), plain);
    assert_eq!(one[0].precision, None);
    let long = &["data.seq_len=128"];
    let long_one = measured(long, "tp1");
    let layers = |steps: &[StepMetrics]| steps[1].precision.clone().unwrap();
    let lost = |found: &LayerQuantization| found.input.as_ref().unwrap().underflowed;
    let largest = layers(&one).layers.values().map(lost).fold(0.0, f64::max);
    assert!(
        largest
            > if recipe[0].ends_with("delayed") {
                0.1
            } else {
                0.0
            },
        "{largest}"
    );
    for (sets, layout, expected) in [
        (&[][..], "tp2-sp", &one),
        (&["parallel.schedule=zb-h1"], "pp2", &one),
        (&["recompute.method=uniform"], "tp1", &one),
        (
            &["recompute.method=uniform", "parallel.zero=3"],
            "dp2",
            &one,
        ),
        (long, "cp2", &long_one),
    ] {
        let found = distance(&layers(&measured(sets, layout)), &layers(expected));
        // The gradient of the first query is zero, or with context parallelism zero up to rounding.
        assert!(
            found[0] < 1e-2 && found[1] < 2e-2,
            "{recipe:?}, {layout}: {found:?}"
        );
    }
}
