//! The logs of runs for other programs, and alerts.

mod alerts;
mod csv;
mod layers;
mod metrics;
mod prometheus;
mod tensorboard;
mod wandb;
mod wire;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use megaburn_test_support::run::Run;
use nix::sys::signal::Signal;

use super::child::{Ended, Ranks};

/// More steps than any test waits for.
const ENDLESS: u64 = 1_000_000;

/// Trains to `steps` steps with further settings.
fn train(run: &Run, steps: u64, sets: &[&str]) -> Ended {
    Ranks::threads(&run.args("tp1", steps, sets))
        .finish()
        .remove(0)
}

/// A run that was killed some steps after its last checkpoint, and resumed for a few steps more.
/// Returns the number of steps.
fn killed_and_resumed(run: &Run, sets: &[&str]) -> u64 {
    let sets = [
        sets,
        &["train.checkpoint_interval=3", "train.keep_checkpoints=1"],
    ]
    .concat();
    let mut ranks = Ranks::threads(&run.args("tp1", ENDLESS, &sets));
    ranks.wait_until(|| run.steps().len() >= 8);
    ranks.signal(0, Signal::SIGKILL);
    ranks.wait_all();
    let steps = run.steps().last().unwrap().step + 4;
    train(run, steps, &sets);
    assert_eq!(run.steps().last().unwrap().step, steps);
    steps
}

/// The path of a script in `tests/tools`.
fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tools")
        .join(name)
}

/// Compares the logs in the folder of a run with its metrics by a script, if Python can import
/// `module`: the program that reads such logs.
fn compare_by_script(name: &str, module: &str, folder: &Path) {
    let python = |args: &[&str]| Command::new("python3").args(args).output();
    let can_import = python(&["-c", &format!("import {module}")]);
    if !can_import.is_ok_and(|output| output.status.success()) {
        eprintln!("not compared by {name}: python3 cannot import {module}");
        return;
    }
    let [script, folder] =
        [script(name), folder.to_path_buf()].map(|path| path.display().to_string());
    let output = python(&[&script, &folder]).unwrap();
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{printed}");
    eprintln!("{printed}");
}
