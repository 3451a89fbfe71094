//! Which data sets megaburn wrote: those with a description next to them that fits.

use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::disk;
use crate::{error::DataError, indexed::with_ending};

/// The file that describes a data set which megaburn wrote.
pub(crate) fn description_path(prefix: &Path) -> PathBuf {
    with_ending(prefix, ".megaburn")
}

/// The description of a data set; `None` if there is none, or the index is another one or the
/// tokens have another size.
pub(super) fn description(prefix: &Path) -> Option<Value> {
    let index = hash_of(&with_ending(prefix, ".idx")).ok()?;
    description_of(prefix, index)
}

/// The description of a data set whose index has a hash.
pub(crate) fn description_of(prefix: &Path, index_hash: u64) -> Option<Value> {
    let text = fs::read_to_string(description_path(prefix)).ok()?;
    let bytes = fs::metadata(with_ending(prefix, ".bin")).ok()?.len();
    description_from(&text, bytes, index_hash)
}

/// The description in a text, of a data set whose tokens have a size and whose index has a hash;
/// `None` if it does not fit them.
pub(crate) fn description_from(text: &str, bin_bytes: u64, index_hash: u64) -> Option<Value> {
    let description = parse(text)?;
    let fits =
        description["bin_bytes"] == bin_bytes && description["index_xxh3"] == hex(index_hash);
    fits.then_some(description)
}

/// Whether every file of a data set that exists is the one that its description names. A process
/// that was killed while it replaced the data set may have left only some of them.
pub(super) fn is_owned(prefix: &Path) -> bool {
    let Some(description) = read(prefix) else {
        return false;
    };
    let fits = |(ending, field): (&str, &str)| match hash_of(&with_ending(prefix, ending)) {
        Ok(found) => description[field] == hex(found),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    [(".bin", "bin_xxh3"), (".idx", "index_xxh3")]
        .into_iter()
        .all(fits)
}

fn read(prefix: &Path) -> Option<Value> {
    parse(&fs::read_to_string(description_path(prefix)).ok()?)
}

fn parse(text: &str) -> Option<Value> {
    let description: Value = serde_json::from_str(text).ok()?;
    description["index_xxh3"].is_string().then_some(description)
}

/// A hash as descriptions and journals write it.
pub(crate) fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

/// The xxh3 hash of a file.
pub(crate) fn hash_of(path: &Path) -> io::Result<u64> {
    hash_from(File::open(path)?)
}

/// The xxh3 hash of what is read.
pub(crate) fn hash_from(from: impl Read) -> io::Result<u64> {
    let mut from = BufReader::new(from);
    let (mut hash, mut bytes) = (Xxh3::new(), vec![0; 1 << 18]);
    loop {
        let count = from.read(&mut bytes)?;
        if count == 0 {
            return Ok(hash.digest());
        }
        hash.update(&bytes[..count]);
    }
}

/// Checks that a data set may be written with a prefix.
///
/// # Errors
/// One of its files exists, and `force` is not set or megaburn did not write it.
pub(crate) fn check_replaceable(prefix: &Path, force: bool) -> Result<(), DataError> {
    let mut paths = files(prefix).into_iter();
    let Some(path) = paths.find(|path| path.symlink_metadata().is_ok()) else {
        return Ok(());
    };
    if !force {
        return Err(DataError::Exists { path });
    }
    if !is_owned(prefix) {
        return Err(DataError::Foreign {
            why: "no description of megaburn fits it".into(),
            path,
        });
    }
    Ok(())
}

/// Removes a data set, which [`check_replaceable`] has passed. The description is last: without it,
/// the rest would not be recognised.
pub(super) fn remove(prefix: &Path) -> Result<(), DataError> {
    let [bin, idx, description] = files(prefix);
    for path in [idx, bin, description] {
        disk::remove(&path)?;
    }
    Ok(())
}

fn files(prefix: &Path) -> [PathBuf; 3] {
    [
        with_ending(prefix, ".bin"),
        with_ending(prefix, ".idx"),
        description_path(prefix),
    ]
}
