//! Steps that are not finite, once or again, and spikes of the loss.

use std::{fs, path::Path};

use megaburn::train::{TrainError, signal::StopSignal, train_task};
use megaburn_test_support::run::tensor_files;
use rstest::rstest;
use serde_json::{Value, json};
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
    tensors(dir, 6)
}

/// The tensors of a checkpoint: weights, masters and moments.
fn tensors(dir: &Path, step: u64) -> Vec<Vec<u8>> {
    let mut files = tensor_files(&dir.join(format!("checkpoints/step-{step:08}")));
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
    // Which of the two ranks reads the spike depends on their speed.
    assert_eq!(skipped_losses[..19], kept_losses[..19]);
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

/// The state of the trainer in a checkpoint.
fn trainer_state(dir: &Path, step: u64) -> Value {
    let checkpoint = dir.join(format!("checkpoints/step-{step:08}"));
    let mut files = fs::read_dir(checkpoint).unwrap().flatten();
    let state = files.find_map(|file| {
        let text = fs::read_to_string(file.path()).ok()?;
        let manifest = serde_json::from_str::<Value>(&text).ok()?;
        manifest.get("trainer").cloned()
    });
    state.unwrap()
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
        let saved = trainer_state(dir.path(), steps_done);
        assert_eq!(
            saved["losses"],
            Value::from(losses[losses.len() - 16..].to_vec())
        );
    }
}

const ROLLBACK: [&str; 3] = [
    "train.on_spike=rollback",
    "train.checkpoint_interval=4",
    "train.keep_checkpoints=10",
];

#[rstest]
#[case(&[])]
#[case(&["parallel.zero=1", "train.dtype=bf16", "train.async_save=true"])]
#[case(&["parallel.zero=3", "train.dtype=bf16"])]
#[case(&["parallel.zero=2", "train.async_save=true"])]
fn a_spike_leads_back_to_the_last_checkpoint_and_past_its_samples(#[case] sets: &[&str]) {
    let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let sets = [
        &SPIKE[..],
        &ROLLBACK,
        sets,
        &["train.check_replicas_interval=1"],
    ]
    .concat();
    train(whole.path(), &sets).unwrap();
    // The checkpoint of step 20 is that of step 16, with another progress.
    assert!(tensors(whole.path(), 20) == tensors(whole.path(), 16));
    assert!(tensors(whole.path(), 24) != tensors(whole.path(), 16));
    let rollback = json!({"step": 20, "to_step": 16, "updates": 16, "samples": [128, 160]});
    for (step, consumed) in [(20, 160), (24, 192)] {
        let state = trainer_state(whole.path(), step);
        let progress = &state["progress"];
        assert_eq!(
            [&progress["step"], &progress["consumed_samples"]],
            [&json!(step), &json!(consumed)]
        );
        let skipped = [&progress["skipped_steps"], &progress["skipped_samples"]];
        assert_eq!(skipped, [&json!(4), &json!(32)]);
        assert_eq!(state["rollbacks"], json!([rollback]));
    }
    let text = fs::read_to_string(whole.path().join("metrics.jsonl")).unwrap();
    let line = text
        .lines()
        .find(|line| line.starts_with("{\"rollback\":20,\"to_step\":16,"));
    assert!(
        line.is_some_and(|line| line.ends_with("\"samples\":[128,160]}")),
        "{text}"
    );
    // Each step has one line, and those after the spike are as low as those before.
    let losses = steps(whole.path());
    let numbers: Vec<u64> = losses.iter().map(|step| step.0).collect();
    assert_eq!(numbers, (1..=24).collect::<Vec<_>>());
    assert!(losses[20].1 < 2.0 * losses[15].1, "{losses:?}");
    // A run that is stopped after the rollback continues in the same way, past the samples.
    train(
        stopped.path(),
        &[&sets[..], &["train.exit_at_step=22"]].concat(),
    )
    .unwrap();
    train(stopped.path(), &sets).unwrap();
    let resumed = steps(stopped.path());
    // Which of the two ranks reads the spike of step 20 depends on their speed.
    assert_eq!(
        (&resumed[..19], &resumed[20..]),
        (&losses[..19], &losses[20..])
    );
    assert!(tensors(stopped.path(), 24) == tensors(whole.path(), 24));
}

/// The samples that a rollback has left out are left out under another layout.
#[test]
fn a_rollback_is_honoured_under_another_layout() {
    let [whole, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let sets = [&SPIKE[..], &ROLLBACK].concat();
    train(whole.path(), &sets).unwrap();
    train(
        other.path(),
        &[&sets[..], &["train.exit_at_step=22"]].concat(),
    )
    .unwrap();
    let layout = ["parallel.dp=1", "parallel.tp=2"];
    train(other.path(), &[&sets[..], &layout].concat()).unwrap();
    let [expected, found] = [&whole, &other].map(|dir| steps(dir.path()));
    assert_eq!(found.len(), 24);
    let pairs = found.iter().zip(&expected);
    for (found, expected) in pairs.filter(|(found, _)| found.0 != 20) {
        assert!(
            (found.1 / expected.1 - 1.0).abs() < 1e-4,
            "{found:?}, {expected:?}"
        );
    }
    assert_eq!(
        trainer_state(other.path(), 24)["progress"]["skipped_samples"],
        32
    );
}

#[rstest]
#[case::no_checkpoint(&["train.checkpoint_interval=0"], 20, "there is no checkpoint yet")]
// The spikes of steps 20 to 22 lead to the weights of step 16, which the checkpoint of step 20 has.
#[case::again_and_again(
    &["points.spike_every=8"],
    23,
    "3 rollbacks have led to the weights of step 20, and a spike followed each"
)]
fn a_run_that_cannot_roll_back_ends(#[case] sets: &[&str], #[case] at: u64, #[case] why: &str) {
    let dir = tempfile::tempdir().unwrap();
    let error = train(dir.path(), &[&SPIKE[..], &ROLLBACK, sets].concat()).unwrap_err();
    assert!(
        matches!(error, TrainError::NoRollback { step, .. } if step == at),
        "{error}"
    );
    assert!(error.to_string().contains(why), "{error}");
    assert_eq!(error.exit().code(), 3);
}

/// Weights, masters and moments are compared and never refused without a fault.
#[rstest]
#[case(&["parallel.dp=2"])]
#[case(&["parallel.dp=2", "parallel.zero=3", "train.dtype=bf16", "net.dropout=0.3"])]
#[case(&["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "parallel.zero=1"])]
fn a_run_that_compares_its_state_changes_no_bit(#[case] sets: &[&str]) {
    let [compared, plain] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let more = [
        "train.check_replicas_interval=1",
        "train.async_save=true",
        "train.checkpoint_interval=2",
    ];
    train(compared.path(), &[sets, &more].concat()).unwrap();
    train(plain.path(), sets).unwrap();
    assert_eq!(steps(compared.path()), steps(plain.path()));
    assert!(weights(compared.path()) == weights(plain.path()));
}
