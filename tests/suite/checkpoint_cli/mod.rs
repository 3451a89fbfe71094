//! `megaburn checkpoint`, as a user starts it.

mod compared;
mod documented;
mod inspected;
mod pruned;
mod resharded;
mod weights;

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_test_support::run::Run;
use serde_json::Value;

use crate::runs::child::{Ended, Ranks};

/// A run with checkpoints at steps 2, 4 and 6.
fn trained(layout: &str) -> Run {
    let run = Run::new();
    train(&run, layout, 6);
    run
}

/// Trains a run up to a step, with a checkpoint at every second step, of which all stay.
fn train(run: &Run, layout: &str, steps: u64) {
    let sets = [
        "train.checkpoint_interval=2",
        "train.keep_checkpoints=99",
        "train.eval_interval=0",
    ];
    Ranks::threads(&run.args(layout, steps, &sets)).finish();
}

/// Runs `megaburn checkpoint` with these words, of which paths are relative to the folder of the
/// run if they begin with `/`.
fn checkpoint(run: &Run, line: &str) -> Ended {
    let word = |word: &str| match word.strip_prefix('/') {
        Some(path) => run.path(path).display().to_string(),
        None => word.to_string(),
    };
    let words: Vec<String> = line.split(' ').map(word).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let ended = Ranks::command(&[&["checkpoint"], &words[..]].concat()).wait_all();
    ended.into_iter().next().unwrap()
}

/// The output of a command that exits with `code`.
#[track_caller]
fn output(run: &Run, line: &str, code: i32) -> String {
    let ended = checkpoint(run, line);
    assert_eq!(ended.code, Some(code), "{line}: {ended:#?}");
    ended.stdout
}

/// The error of a command that is refused as bad input.
#[track_caller]
fn refused(run: &Run, line: &str) -> String {
    let ended = checkpoint(run, line);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(2), ""),
        "{line}: {ended:#?}"
    );
    ended.stderr
}

/// The JSON lines of a command that exits with `code`.
#[track_caller]
fn json(run: &Run, line: &str, code: i32) -> Vec<Value> {
    let lines = output(run, &format!("{line} --json"), code);
    let value = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    lines.lines().map(value).collect()
}

/// The checkpoint of a step.
fn step(run: &Run, step: u64) -> PathBuf {
    run.checkpoints().join(format!("step-{step:08}"))
}

/// The names in a folder, sorted.
fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// Changes a byte in the middle of a file, which only a hash reveals.
fn flip(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() * 2 / 3;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Copies a folder without folders in it.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in names(from) {
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}
