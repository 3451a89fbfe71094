//! Loads cuDNN's files, which must all be of one version.
//!
//! `libcudnn.so.9` opens its parts (`libcudnn_graph.so.9`, the engines, ..) by name, and the loader
//! would take parts of another cuDNN if `LD_LIBRARY_PATH` names one. Therefore all parts in the
//! chosen folder are loaded first; the loader then resolves a name to the library that is already
//! loaded.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use super::choice::folder_of;
use crate::error::CudaError;

/// The folder of the cuDNN that this process has loaded.
///
/// # Errors
/// The process has loaded parts from several folders.
pub(super) fn loaded() -> Result<Option<PathBuf>, CudaError> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    match &folders_of(&maps)[..] {
        [] => Ok(None),
        [folder] => Ok(Some(folder.clone())),
        several => Err(CudaError::Refused(format!(
            "this process has loaded parts of several cuDNN installations, which cannot be \
            mixed: {several:?}; unset LD_PRELOAD, or set {} to one of the folders",
            super::VARIABLE
        ))),
    }
}

/// The folders of all cuDNN libraries in a memory map.
fn folders_of(maps: &str) -> Vec<PathBuf> {
    let files = maps
        .lines()
        .filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let parts = files.filter(|file| {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        (name.starts_with("libcudnn.so") || name.starts_with("libcudnn_")) && name.contains(".so")
    });
    let mut folders: Vec<PathBuf> = parts.map(folder_of).collect();
    folders.sort();
    folders.dedup();
    folders
}

/// Loads a cuDNN and all its parts for the life of the process.
///
/// # Errors
/// A file cannot be loaded, or parts of another folder were loaded with it.
pub(super) fn load(file: &Path) -> Result<Library, CudaError> {
    let folder = folder_of(file);
    for part in parts(&folder) {
        // Leak the handle, so that the part stays loaded.
        std::mem::forget(open(&part)?);
    }
    let library = open(file)?;
    loaded()?;
    Ok(library)
}

/// The part files, sorted so that those needed by others come first.
fn parts(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |name: &str| name.starts_with("libcudnn_") && name.ends_with(".so.9");
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_part(name)).collect();
    let needed = ["libcudnn_graph.so.9", "libcudnn_ops.so.9"];
    names.sort_by_key(|name| {
        (
            needed.iter().position(|first| first == name).unwrap_or(9),
            name.clone(),
        )
    });
    names.into_iter().map(|name| folder.join(name)).collect()
}

fn open(file: &Path) -> Result<Library, CudaError> {
    // SAFETY: loading a library runs its initializers, as linking to it would.
    let library = unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_LOCAL) };
    library.map_err(|why| {
        CudaError::Refused(format!(
            "cannot load cuDNN's file {}: {why}",
            file.display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_names_its_folders() {
        let maps = "7f10-7f20 r-xp 00000000 08:01 1    /a/lib/libcudnn_graph.so.9.14.0\n\
            7f20-7f30 r--p 00000000 08:01 2    /a/lib/libcudnn.so.9\n\
            7f30-7f40 rw-p 00000000 00:00 0\n\
            7f40-7f50 r-xp 00000000 08:01 3    /c/libcudart.so.13\n";
        assert_eq!(folders_of(maps), [PathBuf::from("/a/lib")]);
        let mixed = format!("{maps}7f50-7f60 r-xp 00000000 08:01 4 /b c/libcudnn_ops.so.9\n");
        assert_eq!(folders_of(&mixed), ["/a/lib", "/b c"].map(PathBuf::from));
    }

    #[test]
    fn parts_are_loaded_after_what_they_need() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "adv.so.9",
            "ops.so.9",
            "graph.so.9",
            "graph.so.9.19.0",
            "notes.txt",
        ] {
            fs::write(folder.path().join(format!("libcudnn_{name}")), "").unwrap();
        }
        fs::write(folder.path().join("libcudnn.so.9"), "").unwrap();
        let expected =
            ["graph", "ops", "adv"].map(|part| folder.path().join(format!("libcudnn_{part}.so.9")));
        assert_eq!(parts(folder.path()), expected);
    }
}
