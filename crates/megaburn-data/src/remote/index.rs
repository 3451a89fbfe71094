//! Copies of indices on this host, which are made once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::id;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::Duration;

use megaburn_store::{Object, Version};
use xxhash_rust::xxh3::xxh3_128;

use super::{config::ObjectStoreConfig, event::ObjectStoreEvent, file::RemoteFile};
use crate::{
    cache_folder::{UNFINISHED, Unfinished, default_cache_dir, remove_unfinished},
    error::DataError,
    part::{AppendFile, FolderLock, lock_folder, rename, sync_folder},
};

/// How often a process looks whether another one has finished.
const POLL: Duration = Duration::from_millis(100);
/// Digits of a hash.
const KEY_DIGITS: usize = 32;

/// The path of a copy of an index. Its name has a hash of the URL and the version.
///
/// # Errors
/// There is no folder for it, it cannot be written, or the object cannot be read.
pub(super) fn copy_of(
    object: &Object,
    version: &Version,
    config: &ObjectStoreConfig,
) -> Result<PathBuf, DataError> {
    let folder = config.cache_dir.clone().or_else(default_cache_dir);
    let folder = folder.ok_or_else(|| DataError::NoCacheDir {
        path: object.url().into(),
    })?;
    let path = folder.join(name_of(object, version));
    if is_whole(&path, version) {
        return Ok(path);
    }
    let made = make_copy(object, version, config, &folder, &path);
    made.map_err(|error| match error {
        DataError::Write { path, source } => DataError::Cache { path, source },
        other => other,
    })?;
    Ok(path)
}

fn make_copy(
    object: &Object,
    version: &Version,
    config: &ObjectStoreConfig,
    folder: &Path,
    path: &Path,
) -> Result<(), DataError> {
    let lock = wait_for_lock(folder, config)?;
    // Another process may have copied it until the folder was locked.
    if is_whole(path, version) {
        return Ok(());
    }
    if lock.is_held() {
        remove_unfinished(folder, is_unfinished)?;
    }
    (config.on_event)(ObjectStoreEvent::Downloading {
        url: object.url().into(),
        path: path.into(),
        num_bytes: version.num_bytes,
    });
    download(object, version, config, path)?;
    sync_folder(folder)
}

fn name_of(object: &Object, version: &Version) -> String {
    let key = xxh3_128(format!("{} {version:?}", object.url()).as_bytes());
    let name = object.file_name();
    format!("{key:0KEY_DIGITS$x}-{name}")
}

/// Whether a copy is there. A copy of another size is not what was written, and is written again.
fn is_whole(path: &Path, version: &Version) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == version.num_bytes)
}

fn wait_for_lock(folder: &Path, config: &ObjectStoreConfig) -> Result<FolderLock, DataError> {
    let busy = || DataError::Busy {
        folder: folder.into(),
    };
    loop {
        match lock_folder(folder, &mut || Err(busy())) {
            Err(DataError::Busy { .. }) => {
                (config.on_event)(ObjectStoreEvent::Waiting {
                    folder: folder.into(),
                });
                sleep(POLL);
            }
            locked => return locked,
        }
    }
}

fn download(
    object: &Object,
    version: &Version,
    config: &ObjectStoreConfig,
    path: &Path,
) -> Result<(), DataError> {
    static NUM_DOWNLOADS: AtomicU64 = AtomicU64::new(0);
    let number = NUM_DOWNLOADS.fetch_add(1, Ordering::Relaxed);
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!("{UNFINISHED}{}-{number}", id()));
    let temporary = PathBuf::from(temporary);
    let unfinished = Unfinished(vec![(temporary.clone(), path.into())]);
    let mut copy = AppendFile::open(temporary.clone(), 0)?;
    let from = RemoteFile::new(object.clone(), version.clone(), config);
    let mut bytes = vec![0; config.block_bytes];
    let mut at = 0;
    while at < version.num_bytes {
        let left = usize::try_from(version.num_bytes - at).unwrap_or(usize::MAX);
        let count = bytes.len().min(left);
        from.read(&mut bytes[..count], at)?;
        copy.append(&bytes[..count])?;
        (config.on_event)(ObjectStoreEvent::Downloaded(count as u64));
        at += count as u64;
    }
    copy.sync()?;
    rename(&temporary, path)?;
    drop(unfinished);
    Ok(())
}

/// Whether a file has a temporary name that this module gives.
fn is_unfinished(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let Some((name, process)) = name.rsplit_once(UNFINISHED) else {
        return false;
    };
    let is_process = process
        .split_once('-')
        .is_some_and(|(id, number)| is_number(id) && is_number(number));
    let Some((key, name)) = name.split_once('-') else {
        return false;
    };
    let is_key = key.len() == KEY_DIGITS && key.bytes().all(|b| b.is_ascii_hexdigit());
    is_process && is_key && name.ends_with(".idx")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_names_of_this_module_are_removed() {
        let key = "0123456789abcdef0123456789abcdef";
        assert!(is_unfinished(&format!("{key}-web.idx.unfinished-71-0")));
        assert!(is_unfinished(&format!("{key}-a-b.idx.unfinished-71-12")));
        for name in [
            format!("{key}-web.idx"),
            format!("{key}-web.idx.unfinished-71"),
            format!("{key}-web.bin.unfinished-71-0"),
            format!("{key}-web.idx.unfinished-71-x"),
            "web.idx.unfinished-71-0".into(),
            "my-web.idx.unfinished-71-0".into(),
        ] {
            assert!(!is_unfinished(&name), "{name}");
        }
    }
}
