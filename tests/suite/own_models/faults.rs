//! Steps that are not finite, once or again, and spikes of the loss.

use std::{fs, path::Path};

use megaburn::train::{TrainError, signal::StopSignal, train_task};
use megaburn_test_support::run::tensor_files;
use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

use super::model::{WAVES, config};

fn train(dir: &Path, sets: &[&str]) -> Result<(), TrainError> {
    let run_dir = format!("run.dir={}", dir.display());
    let all = [&[run_dir.as_str(), "run.device=cpu"], sets].concat();
    train_task(&WAVES, config(&all).unwrap(), false, StopSignal::never()).map(drop)
}

/// Number, loss, gradient norm and reruns of each step.
fn steps(dir: &Path) -> Vec<(u64, f64, f64, u64)> {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap_or(f64::NAN);
    lines
        .filter(|line: &Value| line.get("loss").is_some())
        .map(|line| {
            let reruns = line
                .get("reruns")
                .map_or(0, |reruns| reruns.as_u64().unwrap());
            let step = line["step"].as_u64().unwrap();
            (
                step,
                number(&line, "loss"),
                number(&line, "grad_norm"),
                reruns,
            )
        })
        .collect()
}

fn weights(dir: &Path) -> Vec<Vec<u8>> {
    let mut files = tensor_files(&dir.join("checkpoints/step-00000006"));
    assert!(!files.is_empty());
    files.sort();
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

#[rstest]
#[case(&["parallel.dp=2"])]
#[case(&["parallel.dp=2", "parallel.zero=3", "train.dtype=bf16"])]
#[case(&["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "parallel.zero=1"])]
#[case(&["parallel.pp=2", "parallel.schedule=zb-v", "net.dropout=0.3"])]
fn a_step_that_is_finite_when_computed_again_changes_no_bit(#[case] sets: &[&str]) {
    let [once, never] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(never.path(), sets).unwrap();
    train(once.path(), &[sets, &["points.nan_once=11"]].concat()).unwrap();
    let (found, expected) = (steps(once.path()), steps(never.path()));
    assert_eq!(found.len(), 6);
    for (found, expected) in found.iter().zip(&expected) {
        let numbers = |step: &(u64, f64, f64, u64)| (step.0, step.1, step.2);
        assert_eq!(numbers(found), numbers(expected));
    }
    let reruns: u64 = found.iter().map(|step| step.3).sum();
    assert_eq!(reruns, 1, "{found:?}");
    assert!(weights(once.path()) == weights(never.path()));
}

#[rstest]
#[case("points.nan=11", true, "first in the backward pass")]
#[case("points.nan_once=11", false, "the hardware failed once")]
fn a_step_that_is_not_finite_again_or_is_not_computed_again_ends_the_run(
    #[case] fault: &str,
    #[case] reruns: bool,
    #[case] what: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let reruns = format!("train.rerun_non_finite={reruns}");
    let error = train(dir.path(), &["parallel.dp=2", fault, &reruns]).unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { .. }), "{error}");
    assert!(error.to_string().contains(what), "{error}");
}

/// The settings of a run of two ranks, whose loss is a spike in step 20.
const SPIKE: [&str; 5] = [
    "parallel.dp=2",
    "train.steps=24",
    "train.checkpoint_interval=19",
    "points.spike=155",
    "optimizer.clip_grad=0",
];

#[test]
fn a_spike_is_skipped_and_counts_in_no_mean() {
    let [skipped, kept] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    train(
        skipped.path(),
        &[&SPIKE[..], &["train.on_spike=skip"]].concat(),
    )
    .unwrap();
    train(kept.path(), &SPIKE).unwrap();
    let of = |dir: &TempDir| {
        steps(dir.path())
            .into_iter()
            .map(|step| step.1)
            .collect::<Vec<_>>()
    };
    let (skipped_losses, kept_losses) = (of(&skipped), of(&kept));
    assert_eq!(skipped_losses.len(), 24);
    assert_eq!(skipped_losses[..20], kept_losses[..20]);
    assert!(
        skipped_losses[19] > 1e3 * skipped_losses[18],
        "{skipped_losses:?}"
    );
    assert!(
        skipped_losses[20] < 2.0 * skipped_losses[18],
        "{skipped_losses:?}"
    );
    assert_ne!(skipped_losses[20], kept_losses[20]);
    let text = fs::read_to_string(skipped.path().join("metrics.jsonl")).unwrap();
    let marked: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("\"skipped\":true"))
        .collect();
    assert!(
        marked.len() == 1 && marked[0].contains("\"step\":20,"),
        "{marked:?}"
    );
}

#[test]
fn a_spike_stops_the_run_before_its_update() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [&SPIKE[..], &["train.on_spike=stop", "parallel.zero=1"]].concat();
    let error = train(dir.path(), &sets).unwrap_err();
    assert!(
        matches!(error, TrainError::LossSpike { step: 20, .. }),
        "{error}"
    );
    assert_eq!(error.exit().code(), 3);
}

/// Otherwise a resumed run would skip other steps than one that was not interrupted.
#[test]
fn a_resumed_run_knows_the_losses_before() {
    let dir = tempfile::tempdir().unwrap();
    for steps_done in [18, 20] {
        let number = format!("train.steps={steps_done}");
        train(
            dir.path(),
            &["parallel.dp=2", "train.on_spike=skip", &number],
        )
        .unwrap();
        let losses: Vec<f64> = steps(dir.path()).iter().map(|step| step.1).collect();
        let checkpoint = dir.path().join(format!("checkpoints/step-{steps_done:08}"));
        let saved = fs::read_dir(checkpoint)
            .unwrap()
            .flatten()
            .find_map(|file| {
                let text = fs::read_to_string(file.path()).ok()?;
                serde_json::from_str::<Value>(&text)
                    .ok()?
                    .get("trainer")
                    .cloned()
            });
        let saved = saved.unwrap();
        assert_eq!(
            saved["losses"],
            Value::from(losses[losses.len() - 16..].to_vec())
        );
    }
}
