//! `megaburn sweep`: grids and lists of runs, resumed, compared and fitted.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use megaburn::report::scaling_law::{ScalingLaw, ScalingPoint, fit};
use megaburn_test_support::run::Run;
use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

/// A file of a sweep next to a run's configuration, whose folder is `sweep`.
fn file(run: &Run, text: &str) -> PathBuf {
    let path = run.path("sweep.toml");
    let text = format!("dir = \"sweep\"\nconfig = [\"config.toml\"]\n{text}");
    fs::write(&path, text).unwrap();
    // The sweep gives each run its folder.
    let config = fs::read_to_string(run.path("config.toml")).unwrap();
    let own = config.lines().filter(|line| !line.starts_with("dir = "));
    fs::write(run.path("config.toml"), own.collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn sweep(path: &Path, args: &[&str]) -> Ended {
    let args = [&["sweep", path.to_str().unwrap()], args].concat();
    Ranks::command(&args).wait_all().remove(0)
}

const GRID: &str = "jobs = 2
[set]
train.steps = 4
train.eval_interval = 0
[grid]
optimizer.lr = [1e-3, 1e-2]
\"model.layers\" = [1, 2]
";

#[test]
fn a_grid_is_trained_compared_and_not_trained_again() {
    let run = Run::new();
    let path = file(&run, GRID);
    let ended = sweep(&path, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let text = &ended.stdout;
    for part in [
        "model.layers  optimizer.lr  state     step  loss",
        "layers2-lr0.01",
        "layers1-lr0.001",
        "finished  4 ",
        "best     layers",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
    assert_eq!(ended.stderr.matches(": finished\n").count(), 4, "{ended:?}");
    let dir = run.path("sweep");
    let picture = fs::read_to_string(dir.join("sweep.svg")).unwrap();
    assert_eq!(picture.matches("<circle").count(), 4, "{picture}");
    let found: Value =
        serde_json::from_str(&fs::read_to_string(dir.join("results.json")).unwrap()).unwrap();
    let runs = found["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    assert_eq!(runs[0]["settings"]["model.layers"], 1);
    assert_eq!(runs[0]["tokens"], 4 * 8 * 16);
    assert!(runs[2]["parameters"].as_u64() > runs[0]["parameters"].as_u64());
    // Each has a folder and a log of its own.
    assert!(dir.join("layers1-lr0.01/checkpoints").is_dir());
    let log = fs::read_to_string(dir.join("logs/layers1-lr0.01.log")).unwrap();
    assert!(log.contains("layers1-lr0.01"), "{log}");

    let again = sweep(&path, &[]);
    assert_eq!(again.code, Some(0), "{again:?}");
    assert_eq!(again.stdout, *text);
    assert_eq!(
        again.stderr.matches(": finished before\n").count(),
        4,
        "{again:?}"
    );
    assert_eq!(again.stderr.matches(": starts\n").count(), 0, "{again:?}");

    // A changed setting continues the runs that it concerns.
    let longer = fs::read_to_string(&path)
        .unwrap()
        .replace("train.steps = 4", "train.steps = 6");
    fs::write(&path, longer).unwrap();
    let longer = sweep(&path, &["--json"]);
    assert_eq!(longer.code, Some(0), "{longer:?}");
    let found: Value = serde_json::from_str(&longer.stdout).unwrap();
    assert_eq!(found["runs"][3]["step"], 6, "{found}");
}

#[rstest]
#[case::killed(Signal::SIGKILL)]
#[case::asked_to_stop(Signal::SIGTERM)]
fn a_sweep_that_was_cut_off_continues(#[case] signal: Signal) {
    let run = Run::new();
    let text = "[set]\ntrain.steps = 400\ntrain.checkpoint_interval = 5\ntrain.eval_interval = 0\n\
        [[run]]\nname = \"a\"\ntrain.steps = 3\n[[run]]\nname = \"b\"\n[[run]]\nname = \"c\"\n\
        train.steps = 2\n";
    let path = file(&run, text);
    let mut first = Ranks::command(&["sweep", path.to_str().unwrap()]);
    let checkpoint = run.path("sweep/b/checkpoints/step-00000005");
    first.wait_until(|| checkpoint.is_dir());
    first.signal(0, signal);
    let ended = first.wait_all().remove(0);
    let state = || fs::read_to_string(run.path("sweep/b/state.json")).unwrap();
    match signal {
        Signal::SIGTERM => {
            assert_eq!(ended.code, Some(130), "{ended:?}");
            assert!(
                ended.stdout.contains("waiting") && ended.stdout.contains("stopped"),
                "{ended:?}"
            );
            assert!(state().contains("\"stopped\""), "{}", state());
        }
        _ => assert_eq!(ended.code, None, "{ended:?}"),
    }
    // The run died with the sweep, so nothing holds its folder.
    let shorter = fs::read_to_string(&path)
        .unwrap()
        .replace("train.steps = 400", "train.steps = 60");
    fs::write(&path, shorter).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let ended = sweep(&path, &["--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("a: finished before"), "{ended:?}");
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    let states = [0, 1, 2].map(|run| found["runs"][run]["state"].clone());
    assert_eq!(states, ["finished", "finished", "finished"], "{found}");
    let log = fs::read_to_string(run.path("sweep/logs/b.log")).unwrap();
    assert!(log.contains("resum"), "{log}");
}

#[test]
fn a_run_that_fails_does_not_end_the_others() {
    let run = Run::new();
    let text = "[set]\ntrain.steps = 2\n[[run]]\nname = \"bad\"\nmodel.heads = 3\n[[run]]\nname = \"good\"\n";
    let ended = sweep(&file(&run, text), &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let text = &ended.stdout;
    assert!(
        text.contains("failed   bad: ") && text.contains("best     good"),
        "{text}"
    );
}

#[test]
fn a_law_is_fitted_to_the_runs_of_a_sweep() {
    let run = Run::new();
    let text = "fit = \"scaling-law\"\njobs = 2\n[set]\ntrain.eval_interval = 0\n[grid]\n\
        model.layers = [1, 2]\ntrain.steps = [3, 6, 12]\n";
    let path = file(&run, text);
    let ended = sweep(&path, &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("law      L(N, D) = "), "{ended:?}");
    assert_eq!(ended.stdout.matches("\nresidual ").count(), 6, "{ended:?}");
    let picture = fs::read_to_string(run.path("sweep/sweep.svg")).unwrap();
    assert!(picture.contains("thin lines: the law") && picture.contains("tokens"));
    let list = sweep(&path, &["--list", "--json"]);
    let found: Value = serde_json::from_str(&list.stdout).unwrap();
    assert_eq!(found["law"]["residuals"].as_array().unwrap().len(), 6);
}

/// The law of the paper (Hoffmann et al. 2022, equation 10).
const CHINCHILLA: ScalingLaw = ScalingLaw {
    e: 1.69,
    a: 406.4,
    b: 410.7,
    alpha: 0.34,
    beta: 0.28,
};

fn points(noise: impl Fn(usize) -> f64) -> Vec<ScalingPoint> {
    let sizes = [1e7, 1e8, 1e9, 1e10].into_iter();
    let all = sizes.flat_map(|n| [3e8, 3e9, 3e10, 3e11].map(|d| (n, d)));
    let point = |(number, (parameters, tokens)): (usize, (f64, f64))| ScalingPoint {
        parameters,
        tokens,
        loss: CHINCHILLA.loss(parameters, tokens) * noise(number).exp(),
    };
    all.enumerate().map(point).collect()
}

#[test]
fn a_planted_law_is_recovered() {
    let found = fit(&points(|_| 0.0)).unwrap();
    let close = |found: f64, planted: f64, what: &str| {
        assert!(
            (found / planted - 1.0).abs() < 1e-3,
            "{what}: {found}, not {planted}"
        );
    };
    close(found.law.e, CHINCHILLA.e, "E");
    close(found.law.a, CHINCHILLA.a, "A");
    close(found.law.b, CHINCHILLA.b, "B");
    close(found.law.alpha, CHINCHILLA.alpha, "alpha");
    close(found.law.beta, CHINCHILLA.beta, "beta");
    assert!(found.huber_loss < 1e-12);
    let [parameters, tokens] = found.law.best_for(6.0 * 1e9 * 2e10);
    close(parameters * tokens, 2e19, "N D");
    let near = |n: f64| CHINCHILLA.loss(n, 2e19 / n);
    assert!(near(parameters) < near(1.1 * parameters) && near(parameters) < near(0.9 * parameters));
}

#[test]
fn runs_that_went_wrong_hardly_move_the_law() {
    // Two of sixteen runs ended 10% too high; squares would follow them.
    let found = fit(&points(|number| if number % 8 == 5 { 0.1 } else { 0.0 })).unwrap();
    assert!(
        (found.law.alpha - CHINCHILLA.alpha).abs() < 0.01,
        "{found:?}"
    );
    assert!((found.law.beta - CHINCHILLA.beta).abs() < 0.01, "{found:?}");
    assert!((found.law.e - CHINCHILLA.e).abs() < 0.03, "{found:?}");
    let far = found
        .residuals
        .iter()
        .filter(|residual| residual.abs() > 0.05);
    assert_eq!(far.count(), 2, "{found:?}");
}

#[rstest]
#[case(5, |_: &mut ScalingPoint| {}, "6 finished runs at least, and there are 5")]
#[case(16, |point: &mut ScalingPoint| point.tokens = 1e9, "the same number of tokens")]
#[case(16, |point: &mut ScalingPoint| point.loss = -1.0, "positive numbers")]
fn no_law_is_fitted_to_too_little(
    #[case] count: usize,
    #[case] change: fn(&mut ScalingPoint),
    #[case] message: &str,
) {
    let mut points = points(|_| 0.0);
    points.truncate(count);
    points.iter_mut().for_each(change);
    let error = fit(&points).unwrap_err();
    assert!(error.contains(message), "{error}");
}
