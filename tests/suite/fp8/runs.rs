//! Delayed scaling over steps, evaluations and checkpoints.

use megaburn::train::TrainError;
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
