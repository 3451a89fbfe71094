//! Which data sets megaburn wrote: those with a description next to them that fits.

use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::{error::DataError, indexed::with_ending};

/// The file that describes a data set which megaburn wrote.
pub(crate) fn description_path(prefix: &Path) -> PathBuf {
    with_ending(prefix, ".megaburn")
}

/// The description of a data set; `None` if there is none, or the index is another one.
pub(crate) fn description(prefix: &Path) -> Option<Value> {
    let text = fs::read_to_string(description_path(prefix)).ok()?;
    let description: Value = serde_json::from_str(&text).ok()?;
    let hash = u64::from_str_radix(description["index_xxh3"].as_str()?, 16).ok()?;
    match hash_of(&with_ending(prefix, ".idx")) {
        Ok(found) => (found == hash).then_some(description),
        // The process that replaced the data set was killed before the new index had its name.
        Err(error) if error.kind() == ErrorKind::NotFound => Some(description),
        Err(_) => None,
    }
}

fn hash_of(path: &Path) -> std::io::Result<u64> {
    let mut file = BufReader::new(File::open(path)?);
    let (mut hash, mut bytes) = (Xxh3::new(), vec![0; 1 << 18]);
    loop {
        let count = file.read(&mut bytes)?;
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
pub(super) fn check_replaceable(prefix: &Path, force: bool) -> Result<(), DataError> {
    let paths = [
        with_ending(prefix, ".bin"),
        with_ending(prefix, ".idx"),
        description_path(prefix),
    ];
    check_paths(paths, prefix, force)
}

/// The same for some of its files.
pub(super) fn check_paths(
    paths: impl IntoIterator<Item = PathBuf>,
    prefix: &Path,
    force: bool,
) -> Result<(), DataError> {
    let mut paths = paths.into_iter();
    let Some(path) = paths.find(|path| path.symlink_metadata().is_ok()) else {
        return Ok(());
    };
    if !force {
        return Err(DataError::Exists { path });
    }
    if description(prefix).is_none() {
        return Err(DataError::Foreign {
            why: "no description of megaburn fits it".into(),
            path,
        });
    }
    Ok(())
}
