//! Delayed scaling over steps, evaluations and checkpoints.

use megaburn::train::{LossScaleConversion, ResumedAmaxes, TrainError};
use rstest::rstest;

use super::support::{config, distances, numbers, on_trainers, train};

const DELAYED: [&str; 2] = ["precision.recipe=delayed", "precision.amax_history_len=3"];

/// The losses and gradient norms of steps after `saved`, by a trainer that resumed there.
fn resumed(layouts: [&str; 2], saved: usize, num: usize, sets: &[&str]) -> Vec<[f64; 2]> {
    let dir = tempfile::tempdir().unwrap();
    let sets = [&DELAYED, sets].concat();
    on_trainers(&config(dir.path(), &sets, layouts[0]), |mut trainer| {
        for _ in 0..saved {
            trainer.step()?;
            trainer.evaluate()?;
        }
        trainer.save()
    });
    let mut ranks = on_trainers(&config(dir.path(), &sets, layouts[1]), |mut trainer| {
        trainer.resume()?.expect("there is a checkpoint");
        (0..num)
            .map(|_| trainer.step())
            .collect::<Result<Vec<_>, TrainError>>()
    });
    numbers(&ranks.swap_remove(0))
}

fn uninterrupted(layout: &str, num: usize, sets: &[&str]) -> Vec<[f64; 2]> {
    let dir = tempfile::tempdir().unwrap();
    train(&config(dir.path(), &[&DELAYED, sets].concat(), layout), num)
}

/// The scales of a resumed run are those of an uninterrupted one, and evaluations change none.
#[rstest]
fn a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    #[values("tp1", "tp2-pp2-sp")] layout: &str,
    #[values("max", "most_recent")] compute: &str,
) {
    let sets = [
        &format!("precision.amax_compute={compute}"),
        "precision.margin=1",
    ];
    let expected = uninterrupted(layout, 4, &sets);
    assert_eq!(resumed([layout; 2], 2, 2, &sets), expected[2..]);
    // Another history gives other scales: the test would see if they were lost.
    let own = resumed([layout; 2], 2, 2, &[sets[0], "precision.margin=2"]);
    assert_ne!(own, expected[2..]);
}

#[test]
fn a_run_goes_on_under_another_layout() {
    let expected = uninterrupted("tp1", 4, &[]);
    let found = resumed(["tp2-sp", "pp2"], 2, 2, &[]);
    let [losses, norms] = distances(&found, &expected[2..]);
    assert!(losses < 1e-4 && norms < 1e-2, "{losses} {norms}");
}

/// A run may go on with another recipe. Magnitudes that it does not use are dropped, and those that
/// it lacks start afresh; both are said.
#[test]
fn another_recipe_goes_on_with_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let next = |sets: &[&str], layout: &str| {
        let config = config(dir.path(), sets, layout);
        let mut ranks = on_trainers(&config, |mut trainer| {
            let resumed = trainer.resume()?;
            let step = trainer.step()?;
            trainer.save()?;
            Ok((resumed, step))
        });
        ranks.swap_remove(0)
    };
    let delayed = "precision.recipe=delayed";
    // Two layers of four matrices with three operands each.
    let all = 2 * 4 * 3;
    let starts = [
        (vec![], "tp1", [0, 0], vec![]),
        (
            vec!["precision.recipe=tensorwise"],
            "tp1",
            [0, 0],
            vec!["precision.recipe: bf16 -> tensorwise"],
        ),
        (
            vec![delayed],
            "tp2",
            [0, all],
            vec!["precision.recipe: tensorwise -> delayed"],
        ),
        (
            vec![delayed, "precision.num_layers_at_end_in_bf16=1"],
            "pp2",
            [all / 2, 0],
            vec!["precision.num_layers_at_end_in_bf16: 0 -> 1"],
        ),
        (
            vec![delayed],
            "tp1",
            [0, all / 2],
            vec!["precision.num_layers_at_end_in_bf16: 1 -> 0"],
        ),
        (
            vec!["train.dtype=bf16"],
            "tp1",
            [all, 0],
            vec![
                "precision.recipe: delayed -> bf16",
                "train.dtype: f32 -> bf16",
            ],
        ),
        (vec![], "tp1", [0, 0], vec!["train.dtype: bf16 -> f32"]),
    ];
    for (index, (sets, layout, [dropped, missing], changed)) in starts.into_iter().enumerate() {
        let (resumed, step) = next(&sets, layout);
        assert_eq!(step.step, index as u64 + 1, "{sets:?}");
        assert!(step.loss.is_finite(), "{sets:?}");
        let Some(resumed) = resumed else {
            assert_eq!(index, 0, "each start but the first one resumes");
            continue;
        };
        let told: Vec<_> = resumed.changes.iter().map(ToString::to_string).collect();
        assert_eq!(told, changed, "{sets:?}");
        let expected = ResumedAmaxes { dropped, missing };
        assert_eq!(resumed.conversions.amaxes, expected, "{sets:?}");
    }
}

/// Only f16 has a loss scale.
#[test]
fn a_loss_scale_is_dropped_and_starts_afresh() {
    let dir = tempfile::tempdir().unwrap();
    let next = |dtype: &str| {
        let dtype = format!("train.dtype={dtype}");
        let sets = [dtype.as_str(), "optimizer.initial_loss_scale=512"];
        let mut ranks = on_trainers(&config(dir.path(), &sets, "tp1"), |mut trainer| {
            let resumed = trainer.resume()?;
            trainer.step()?;
            trainer.save()?;
            Ok(resumed.and_then(|resumed| resumed.conversions.loss_scale))
        });
        ranks.swap_remove(0)
    };
    assert_eq!(next("f16"), None);
    assert_eq!(next("f16"), None);
    assert_eq!(next("bf16"), Some(LossScaleConversion::Dropped));
    assert_eq!(next("f16"), Some(LossScaleConversion::Starts(512.0)));
}
