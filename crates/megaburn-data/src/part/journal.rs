//! The journal of an unfinished data set: a line per state that was saved. A line is its xxh3 hash
//! and JSON. A line that was not written completely is not valid, and the one before it counts.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::disk::{self, AppendFile};
use crate::error::DataError;

/// The name of the file.
pub(super) const JOURNAL: &str = "journal";
/// Its name until its first line is on the disk.
pub(super) const NEW_JOURNAL: &str = "journal.new";

/// A journal that is being written.
#[derive(Debug)]
pub(super) struct Journal(AppendFile);

/// What a journal says.
#[derive(Debug)]
pub(super) struct Saved {
    /// What is being written, from what, and how.
    pub(super) identity: Value,
    /// The last state, if there is one.
    pub(super) state: Option<Value>,
    /// Bytes of valid lines.
    num_bytes: u64,
}

impl Journal {
    /// Starts a journal, whose first line says what is being written.
    pub(super) fn create(folder: &Path, identity: &Value) -> Result<Self, DataError> {
        let (new, path) = (folder.join(NEW_JOURNAL), folder.join(JOURNAL));
        let first = line(identity);
        disk::write_file(&new, |out| out.write_all(&first))?;
        disk::rename(&new, &path)?;
        disk::sync_folder(folder)?;
        Ok(Self(AppendFile::open(path, first.len() as u64)?))
    }

    /// Continues a journal after its last valid line.
    pub(super) fn resume(folder: &Path, saved: &Saved) -> Result<Self, DataError> {
        Ok(Self(AppendFile::open(
            folder.join(JOURNAL),
            saved.num_bytes,
        )?))
    }

    /// Adds a state and writes it to the disk.
    pub(super) fn save(&mut self, state: &Value) -> Result<(), DataError> {
        self.0.append(&line(state))?;
        self.0.sync()
    }
}

impl Saved {
    /// Reads the journal of a folder; `None` if there is none, or its first line is not valid.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, DataError> {
        let path: PathBuf = folder.join(JOURNAL);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(DataError::Io { path, source }),
        };
        let mut num_bytes = 0;
        let valid = bytes
            .split_inclusive(|byte| *byte == b'\n')
            .map_while(|line| {
                let value = parse(line)?;
                num_bytes += line.len() as u64;
                Some(value)
            });
        let mut states: Vec<Value> = valid.collect();
        if states.is_empty() {
            return Ok(None);
        }
        let identity = states.remove(0);
        Ok(Some(Self {
            identity,
            state: states.pop(),
            num_bytes,
        }))
    }
}

fn line(value: &Value) -> Vec<u8> {
    let json = value.to_string();
    format!("{:016x} {json}\n", xxh3_64(json.as_bytes())).into_bytes()
}

fn parse(line: &[u8]) -> Option<Value> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let (hash, json) = line.split_once(' ')?;
    let valid = u64::from_str_radix(hash, 16) == Ok(xxh3_64(json.as_bytes()));
    valid.then(|| serde_json::from_str(json).ok())?
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_complete_line_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Saved::read(dir.path()).unwrap().is_none());
        let mut journal = Journal::create(dir.path(), &json!({"of": "a"})).unwrap();
        journal.save(&json!(1)).unwrap();
        journal.save(&json!({"two": 2})).unwrap();
        drop(journal);
        let path = dir.path().join(JOURNAL);
        let whole = fs::read(&path).unwrap();
        let ends: Vec<usize> = (1..=whole.len())
            .filter(|end| whole[end - 1] == b'\n')
            .collect();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let saved = Saved::read(dir.path()).unwrap();
            let lines = ends.iter().filter(|end| **end <= cut).count();
            let state = saved.as_ref().and_then(|saved| saved.state.clone());
            let expected = [None, None, Some(json!(1)), Some(json!({"two": 2}))];
            assert_eq!(
                (saved.is_some(), state),
                (lines > 0, expected[lines].clone()),
                "{cut}"
            );
            if let Some(saved) = saved {
                let mut journal = Journal::resume(dir.path(), &saved).unwrap();
                journal.save(&json!("next")).unwrap();
                let saved = Saved::read(dir.path()).unwrap().unwrap();
                assert_eq!(saved.state, Some(json!("next")));
                assert_eq!(saved.identity, json!({"of": "a"}));
            }
        }
    }
}
