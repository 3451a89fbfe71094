//! The program of `examples/own_model.rs`, built outside the workspace: a model of its own in about 60
//! lines, trained by the trainer.

use std::path::Path;

use megaburn::report::metrics::{EvalMetrics, MetricsRecord, StepMetrics, read_metrics};
use tempfile::TempDir;

use super::outside::program;
use crate::runs::child::{Ended, Ranks};

/// Runs the program with the run folder `dir`.
fn run(dir: &Path, args: &[&str]) -> Ended {
    let dir = format!("run.dir={}", dir.display());
    let sets = ["--set", &dir, "--set", "train.global_batch=16"];
    Ranks::program(&program("own_model"), &[&sets, args].concat())
        .wait_all()
        .remove(0)
}

fn succeed(dir: &Path, args: &[&str]) -> String {
    let ended = run(dir, args);
    assert_eq!(ended.code, Some(0), "{args:?}: {ended:#?}");
    ended.stdout
}

/// The steps and evaluations of a run.
fn metrics(dir: &Path) -> (Vec<StepMetrics>, Vec<EvalMetrics>) {
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    for record in read_metrics(dir.join("metrics.jsonl")).unwrap() {
        match record {
            MetricsRecord::Step(step) => steps.push(step),
            MetricsRecord::Eval(eval) => evals.push(eval),
        }
    }
    (steps, evals)
}

#[test]
fn it_trains_under_tp_pp_and_dp_as_on_one_rank_and_resumes_under_another_layout() {
    let [one_rank, split] = [(); 2].map(|()| TempDir::new().unwrap());
    let [one_rank, split] = [&one_rank, &split].map(TempDir::path);
    succeed(one_rank, &["--layout", "tp1", "--steps", "12"]);
    let printed = succeed(split, &["--layout", "tp2-pp2-dp2", "--steps", "8"]);
    for part in [
        "model    surface, ",
        "1000 samples, 200 for validation",
        " items/s",
        "absolute_error",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let resumed = [
        "--resume",
        split.to_str().unwrap(),
        "--layout",
        "dp2",
        "--steps",
        "12",
    ];
    let zero = ["--set", "parallel.zero=3"];
    succeed(split, &[&resumed[..], &zero].concat());

    let (expected, expected_evals) = metrics(one_rank);
    let (found, evals) = metrics(split);
    assert_eq!((expected.len(), found.len()), (12, 12));
    assert!(expected[11].loss < expected[0].loss, "it does not learn");
    for (found, expected) in found.iter().zip(&expected) {
        for (found, expected) in [
            (found.loss, expected.loss),
            (found.grad_norm, expected.grad_norm),
            (
                found.task["absolute_error"],
                expected.task["absolute_error"],
            ),
        ] {
            let relative = (found - expected).abs() / expected;
            assert!(relative <= 1e-4, "{found} and {expected}");
        }
    }
    let last = |evals: &[EvalMetrics]| evals.last().unwrap().eval_loss;
    let relative = (last(&evals) / last(&expected_evals) - 1.0).abs();
    assert!(relative <= 1e-4, "{evals:?} and {expected_evals:?}");
}

#[test]
fn wrong_flags_and_keys_are_refused_with_what_was_meant() {
    let dir = TempDir::new().unwrap();
    for (args, message) in [
        (
            &["--set", "net.hiden=8"][..],
            "the nearest key is `net.hidden`",
        ),
        (
            &["--lr", "0.1"],
            "it is a setting: `--set optimizer.lr=VALUE`",
        ),
        (
            &["--layout", "pp8"],
            "each of the 8 stages needs one, and there are 4",
        ),
        (&["--resume", "nowhere"], "nowhere"),
    ] {
        let ended = run(&dir.path().join("run"), args);
        assert_eq!(ended.code, Some(2), "{args:?}: {ended:#?}");
        assert!(ended.stderr.contains(message), "{args:?}: {ended:#?}");
    }
}
