//! Fixtures stay small, because every clone has all of them in all their versions.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::rules::root;

/// The largest sum of all fixtures, and the largest file, in bytes.
const LARGEST_SUM: u64 = 20_000_000;
const LARGEST_FILE: u64 = 600_000;

#[test]
fn fixtures_stay_small() {
    let mut files = Vec::new();
    add_files(&root().join("tests/fixtures"), &mut files);
    files.sort_unstable();
    let (largest, path) = files.last().unwrap();
    assert!(
        *largest <= LARGEST_FILE,
        "{} has {largest} bytes, and at most {LARGEST_FILE} are allowed: make a smaller model",
        path.display()
    );
    let sum: u64 = files.iter().map(|(len, _)| len).sum();
    assert!(
        sum <= LARGEST_SUM,
        "the fixtures have {sum} bytes, and at most {LARGEST_SUM} are allowed: make smaller ones"
    );
}

/// Adds the files of a folder and of the folders in it, with their sizes.
fn add_files(folder: &Path, files: &mut Vec<(u64, PathBuf)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_files(&path, files);
        } else {
            files.push((fs::metadata(&path).unwrap().len(), path));
        }
    }
}
