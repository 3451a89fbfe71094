//! A folder of index files, of which each set is built once and read by all later runs.
//!
//! The names of a set begin with the hash of its description, which is one of its files. The folder
//! is locked by the process that builds. Files grow under temporary names and are renamed when they
//! are on the disk, so that a file with its name is complete.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use super::{
    event::IndexEvent,
    npy::{NpyFile, NpyShape, NpyWriter, OpenedNpy},
};
use crate::{
    cache_folder::{UNFINISHED, Unfinished, remove_unfinished},
    error::DataError,
    part::{AppendFile, lock_folder, rename, sync_folder},
};

/// The ending of the file that says what an index is of.
const DESCRIPTION: &str = "description.json";
/// Digits of a hash.
const KEY_DIGITS: usize = 32;

/// The files of an index.
#[derive(Debug)]
pub(crate) struct IndexFiles<'a, const N: usize> {
    folder: &'a Path,
    /// What the contents depend on.
    description: String,
    arrays: [(&'static str, NpyShape); N],
}

/// The state of the index files in the folder.
enum Found<const N: usize> {
    Whole([NpyFile; N]),
    /// A file is missing.
    Missing,
    Damaged(PathBuf, String),
}

impl<'a, const N: usize> IndexFiles<'a, N> {
    pub(crate) fn new(
        folder: &'a Path,
        description: &Value,
        arrays: [(&'static str, NpyShape); N],
    ) -> Self {
        Self {
            folder,
            description: format!("{description:#}\n"),
            arrays,
        }
    }

    /// Opens the arrays. If they are not in the folder, `building` is reported and `build` writes
    /// their numbers.
    ///
    /// # Errors
    /// `build` fails, or the folder cannot be written or read.
    pub(crate) fn open_or_build(
        &self,
        report: &mut dyn FnMut(IndexEvent),
        building: IndexEvent,
        build: impl FnOnce(&mut [NpyWriter; N]) -> Result<(), DataError>,
    ) -> Result<[NpyFile; N], DataError> {
        let found = self.find_or_build(report, building, build);
        found.map_err(|error| match error {
            DataError::Write { path, source } => DataError::Cache { path, source },
            other => other,
        })
    }

    fn find_or_build(
        &self,
        report: &mut dyn FnMut(IndexEvent),
        building: IndexEvent,
        build: impl FnOnce(&mut [NpyWriter; N]) -> Result<(), DataError>,
    ) -> Result<[NpyFile; N], DataError> {
        if let Found::Whole(files) = self.find()? {
            return Ok(files);
        }
        let folder = PathBuf::from(self.folder);
        // Without locks several processes may build the same files, of which the last ones stay.
        let lock = lock_folder(self.folder, &mut || {
            let folder = folder.clone();
            report(IndexEvent::Waiting { folder });
            Ok(())
        })?;
        // Another process may have built it until the folder was locked.
        match self.find()? {
            Found::Whole(files) => return Ok(files),
            Found::Damaged(path, why) => report(IndexEvent::Damaged { path, why }),
            Found::Missing => {}
        }
        if lock.is_held() {
            // Also those of other indices: the folder is locked, so no process builds.
            remove_unfinished(self.folder, is_unfinished)?;
        }
        report(building);
        self.write(build)?;
        match self.find()? {
            Found::Whole(files) => Ok(files),
            Found::Damaged(path, why) => Err(DataError::BadOrder { path, why }),
            Found::Missing => Err(self.incomplete()),
        }
    }

    fn incomplete(&self) -> DataError {
        DataError::BadOrder {
            path: self.path(DESCRIPTION),
            why: "a file next to it was removed as soon as it was written".into(),
        }
    }

    fn find(&self) -> Result<Found<N>, DataError> {
        let path = self.path(DESCRIPTION);
        match fs::read(&path) {
            Ok(text) if text == self.description.as_bytes() => {}
            Ok(_) => {
                let why = "it describes another index".into();
                return Ok(Found::Damaged(path, why));
            }
            // That the folder is a file is an error when it is created.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return Ok(Found::Missing);
            }
            Err(source) => return Err(DataError::Io { path, source }),
        }
        let mut files = Vec::new();
        for (name, shape) in &self.arrays {
            let path = self.path(&array_ending(name));
            match NpyFile::open(&path, *shape)? {
                OpenedNpy::Array(file) => files.push(file),
                OpenedNpy::Missing => return Ok(Found::Missing),
                OpenedNpy::Other(why) => return Ok(Found::Damaged(path, why)),
            }
        }
        Ok(<[NpyFile; N]>::try_from(files).map_or(Found::Missing, Found::Whole))
    }

    /// Writes all files and gives them their names.
    fn write(
        &self,
        build: impl FnOnce(&mut [NpyWriter; N]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut unfinished = Unfinished::default();
        let mut add = |ending: &str| {
            let temporary = format!("{ending}{UNFINISHED}{}", std::process::id());
            let temporary = self.path(&temporary);
            unfinished.0.push((temporary.clone(), self.path(ending)));
            temporary
        };
        let mut writers = Vec::new();
        for (name, shape) in &self.arrays {
            writers.push(NpyWriter::create(add(&array_ending(name)), *shape)?);
        }
        let mut description = AppendFile::open(add(DESCRIPTION), 0)?;
        let writers = <[NpyWriter; N]>::try_from(writers);
        let mut writers = writers.map_err(|_| self.incomplete())?;
        build(&mut writers)?;
        for writer in writers {
            writer.finish()?;
        }
        description.append(self.description.as_bytes())?;
        description.sync()?;
        for (temporary, path) in &unfinished.0 {
            rename(temporary, path)?;
        }
        sync_folder(self.folder)
    }

    fn path(&self, ending: &str) -> PathBuf {
        let key = xxh3_128(self.description.as_bytes());
        self.folder.join(format!("{key:0KEY_DIGITS$x}-{ending}"))
    }
}

fn array_ending(name: &str) -> String {
    format!("{name}.npy")
}

/// Whether a file has a temporary name that this module gives.
fn is_unfinished(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let Some((name, process)) = name.rsplit_once(UNFINISHED) else {
        return false;
    };
    let Some((key, ending)) = name.split_once('-') else {
        return false;
    };
    let is_key = key.len() == KEY_DIGITS && key.bytes().all(|b| b.is_ascii_hexdigit());
    is_number(process) && is_key && (ending == DESCRIPTION || ending.ends_with(".npy"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_names_of_this_module_are_removed() {
        let key = "0123456789abcdef0123456789abcdef";
        for name in ["sample_index.npy", "statistics.npy", "description.json"] {
            assert!(is_unfinished(&format!("{key}-{name}.unfinished-71")));
            assert!(!is_unfinished(&format!("{key}-{name}")));
            assert!(!is_unfinished(&format!("{key}-{name}.unfinished-")));
            assert!(!is_unfinished(&format!("my-{name}.unfinished-71")));
        }
        assert!(!is_unfinished(&format!("{key}-notes.txt.unfinished-71")));
    }
}
