//! `megaburn data`, as a user starts it, and training on its files.

mod added_sources;
mod documented;
mod interrupted;
mod preprocess;
mod reading;
mod training;

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::runs::child::{Ended, Ranks};

fn fixture(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.join("fixtures").join(name)
}

/// Runs `megaburn data` with the words of a line, in which `{F}` is the folder of fixtures and
/// `{D}` the folder `dir`.
fn data(dir: &Path, line: &str) -> Ended {
    start(dir, line).wait_all().remove(0)
}

fn start(dir: &Path, line: &str) -> Ranks {
    let word = |word: &str| {
        let word = word.replace("{F}", &fixture("").display().to_string());
        word.replace("{D}", &dir.display().to_string())
    };
    let words: Vec<String> = line.split_whitespace().map(word).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    Ranks::command(&[&["data"], &words[..]].concat())
}

#[track_caller]
fn succeed(dir: &Path, line: &str) -> String {
    let ended = data(dir, line);
    assert_eq!(ended.code, Some(0), "{line}: {ended:#?}");
    assert!(!ended.stdout.contains('\u{1b}'), "{line}: {ended:#?}");
    ended.stdout
}

/// The files of a folder whose names begin with `start`, with their contents.
fn files(dir: &Path, start: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    let mut named: Vec<_> = named.filter(|(name, _)| name.starts_with(start)).collect();
    named.sort();
    named
        .into_iter()
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect()
}
