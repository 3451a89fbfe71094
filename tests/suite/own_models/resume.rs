//! A run of a program's own model continues from its checkpoint.

use rstest::rstest;
use tempfile::TempDir;

use super::model::{WAVES, Waves, local_params, trainers};
use megaburn::{task::ModelTrainer, train::TrainError};
use megaburn_test_support::gather::{FullParams, gather};

/// Resumes in `dir`, trains up to `until` steps and saves. Returns the losses of the steps that were
/// trained, and the parameters.
fn continued(dir: &TempDir, layout: &str, sets: &[&str], until: u64) -> (Vec<f64>, FullParams) {
    let run_dir = format!("run.dir={}", dir.path().display());
    let sets = [&[run_dir.as_str()], sets].concat();
    let train = |mut trainer: ModelTrainer<Waves>| {
        trainer.resume()?;
        let mut losses = Vec::new();
        while trainer.progress().step < until {
            losses.push(trainer.step()?.loss);
        }
        trainer.save()?;
        Ok((losses, local_params(&trainer)?))
    };
    let ranks = trainers(WAVES, &sets, layout, train).into_iter();
    let (losses, params): (Vec<_>, Vec<_>) = ranks.map(Result::unwrap).unzip();
    (losses[0].clone(), gather(&params))
}

#[rstest]
#[case("tp1", &[])]
#[case("tp2-pp2-dp2", &["parallel.zero=1"])]
#[case("tp2-dp2", &["parallel.zero=3", "train.dtype=bf16"])]
fn a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    #[case] layout: &str,
    #[case] sets: &[&str],
) {
    let [whole, halves] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (losses, params) = continued(&whole, layout, sets, 6);
    continued(&halves, layout, sets, 3);
    let (rest, again) = continued(&halves, layout, sets, 6);
    assert_eq!(rest, losses[3..]);
    assert_eq!(again, params);
}

#[test]
fn a_run_continues_under_another_layout() {
    let dir = tempfile::tempdir().unwrap();
    let (expected, _) = continued(&tempfile::tempdir().unwrap(), "tp1", &[], 8);
    let mut losses = Vec::new();
    for (until, layout, sets) in [
        (2, "tp2-pp2-dp2", &["parallel.zero=2"][..]),
        (4, "dp4", &["parallel.zero=3"]),
        (6, "pp2", &["parallel.schedule=zb-v"]),
        (8, "tp2", &[]),
    ] {
        losses.extend(continued(&dir, layout, sets, until).0);
    }
    assert_eq!(losses.len(), 8);
    for (found, expected) in losses.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= 1e-4 * expected,
            "{found} and {expected}"
        );
    }
}

#[rstest]
#[case(&["net.hidden=4"], "is from another model: `blocks.0.down.bias` is [8] there and [4] here")]
#[case(&["net.blocks=3"], "is from another model: `blocks.3.down.bias` is not in the model here")]
#[case(&["net.blocks=5"], "is from another model: `blocks.4.down.bias` is not in the checkpoint")]
#[case(&["points.train=40"], "was trained on 37 samples, but the task has 40 now")]
#[case(&["optimizer.name=sgd"], "was trained with another optimizer: optimizer.name is adamw there and sgd here; start another run")]
#[case(&["run.seed=5"], "is from another run: run.seed is 1234 there and 5 here")]
fn a_checkpoint_of_another_run_is_refused(#[case] sets: &[&str], #[case] message: &str) {
    let dir = tempfile::tempdir().unwrap();
    continued(&dir, "pp2", &[], 1);
    let run_dir = format!("run.dir={}", dir.path().display());
    let sets = [&[run_dir.as_str()], sets].concat();
    let resume =
        |mut trainer: ModelTrainer<Waves>| -> Result<(), TrainError> { trainer.resume().map(drop) };
    for rank in trainers(WAVES, &sets, "pp2", resume) {
        let error = rank.unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_key_of_the_task_that_has_changed_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    continued(&dir, "tp1", &[], 1);
    let run_dir = format!("run.dir={}", dir.path().display());
    let sets = [run_dir.as_str(), "points.nan=30", "optimizer.lr=2e-2"];
    let changes = trainers(WAVES, &sets, "tp1", |mut trainer| {
        let resumed = trainer.resume()?.expect("there is a checkpoint");
        Ok(resumed
            .changes
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>())
    });
    let changes = changes[0].as_ref().unwrap();
    assert!(
        changes.contains(&"points.nan: none -> 30".to_string()),
        "{changes:?}"
    );
    assert!(
        changes.contains(&"optimizer.lr: 0.01 -> 0.02".to_string()),
        "{changes:?}"
    );
}
