//! Helpers for several tests of this crate.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The names in a folder, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// Creates a folder whose file `weights` holds the folder's name.
pub(crate) fn make(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    fs::create_dir(&path).unwrap();
    fs::write(path.join("weights"), name).unwrap();
    path
}
