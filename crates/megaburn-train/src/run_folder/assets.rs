//! `hf/`: the small files of the model that a run started from, which export and generation need.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use megaburn_checkpoint::{REPLACED, TMP, is_there, leftover_of, sibling_path, sync_folder};
use megaburn_models::assets::{ASSETS, Assets};

use super::{RunFolderError, names::names_in};
use crate::error::TrainError;

/// A file in `hf/` that names the run that wrote the folder.
const MARK: &str = ".megaburn-run";

/// Checks that a new run may write its model's small files into `dir`.
///
/// # Errors
/// `hf/` was not written by a run.
pub(super) fn check(dir: &Path) -> Result<(), RunFolderError> {
    let path = dir.join(ASSETS);
    if is_there(&path) && !is_ours(&path) {
        Err(RunFolderError::Taken { path })
    } else {
        Ok(())
    }
}

/// Writes the small files of the run's model into `hf/` of `dir`.
///
/// # Errors
/// `hf/` was not written by a run; a file cannot be written.
pub(super) fn write(dir: &Path, assets: &Assets, run_id: &str) -> Result<(), TrainError> {
    check(dir)?;
    let path = dir.join(ASSETS);
    replace(&path, &assets.kept(), run_id).map_err(|source| TrainError::Write { path, source })
}

/// Writes the files next to `folder` first, so that it never mixes two models. After a crash
/// between the two renames, [`restore`] brings the old folder back.
fn replace(folder: &Path, files: &[(String, Vec<u8>)], run_id: &str) -> io::Result<()> {
    let staging = sibling_path(folder, TMP);
    let old = sibling_path(folder, REPLACED);
    fs::create_dir(&staging)?;
    // The mark is the first file, so that the next start recognises what a crash leaves.
    let mark = (MARK.to_string(), format!("{run_id}\n").into_bytes());
    for (name, bytes) in [&mark].into_iter().chain(files) {
        let mut file = File::create_new(staging.join(name))?;
        file.write_all(bytes)?;
        file.sync_all()?;
    }
    sync_folder(&staging)?;
    let replaces = is_there(folder);
    if replaces {
        fs::rename(folder, &old)?;
    }
    fs::rename(&staging, folder)?;
    sync_folder(folder.parent().unwrap_or(Path::new(".")))?;
    if replaces {
        fs::remove_dir_all(&old)?;
    }
    Ok(())
}

/// Restores the folder after a crash during a replacement, and removes leftovers.
pub(super) fn restore(dir: &Path) -> io::Result<()> {
    let folder = dir.join(ASSETS);
    for name in names_in(dir)? {
        let path = dir.join(&name);
        let Some((ASSETS, suffix)) = leftover_of(&name) else {
            continue;
        };
        if is_ours(&path) {
            if suffix == REPLACED && !is_there(&folder) {
                fs::rename(&path, &folder)?
            } else {
                fs::remove_dir_all(&path)?
            }
        } else {
            // A leftover of a run that was killed before it wrote the mark. It is removed only if
            // it is empty.
            let _ = fs::remove_dir(&path);
        }
    }
    Ok(())
}

/// Marks the `hf/` of a run that an older version started.
pub(super) fn adopt(dir: &Path, run_id: &str) -> io::Result<()> {
    let folder = dir.join(ASSETS);
    if holds_only_ours(&folder) {
        fs::write(folder.join(MARK), format!("{run_id}\n"))
    } else {
        Ok(())
    }
}

/// Whether a run wrote the folder and nothing else was added to it.
pub(super) fn is_ours(folder: &Path) -> bool {
    holds_only_ours(folder) && folder.join(MARK).is_file()
}

fn holds_only_ours(folder: &Path) -> bool {
    let is_real = fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir());
    let is_known = |name: &String| name == MARK || Assets::is_kept_name(name);
    is_real && names_in(folder).is_ok_and(|names| names.iter().all(is_known))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes small files of a model of the run `id`.
    pub(in crate::run_folder) fn put(dir: &Path, id: &str) {
        replace(&dir.join(ASSETS), &files("one"), id).unwrap();
    }

    fn files(text: &str) -> Vec<(String, Vec<u8>)> {
        vec![("tokenizer.json".to_string(), text.as_bytes().to_vec())]
    }

    fn tokenizer(folder: &Path) -> String {
        fs::read_to_string(folder.join("tokenizer.json")).unwrap()
    }

    #[test]
    fn a_folder_is_ours_if_a_run_wrote_it_and_nothing_was_added() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(ASSETS);
        for text in ["one", "two"] {
            replace(&folder, &files(text), "1f").unwrap();
            assert!(is_ours(&folder) && tokenizer(&folder) == text);
            assert_eq!(names_in(dir.path()).unwrap(), [ASSETS]);
        }
        fs::write(folder.join("model.safetensors"), "weights").unwrap();
        assert!(!is_ours(&folder));
        fs::remove_file(folder.join("model.safetensors")).unwrap();
        fs::remove_file(folder.join(MARK)).unwrap();
        assert!(!is_ours(&folder), "a downloaded model has the same names");
        adopt(dir.path(), "1f").unwrap();
        assert!(is_ours(&folder));
    }

    #[test]
    fn a_crash_between_the_renames_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join(ASSETS);
        replace(&folder, &files("one"), "1f").unwrap();
        fs::rename(&folder, dir.path().join("hf.replaced-1-2")).unwrap();
        replace(&dir.path().join("hf.tmp-1-2"), &files("two"), "1f").unwrap();
        fs::create_dir(dir.path().join("hf.tmp-1-3")).unwrap();
        restore(dir.path()).unwrap();
        assert_eq!(tokenizer(&folder), "one");
        assert_eq!(names_in(dir.path()).unwrap(), [ASSETS]);
    }

    #[test]
    fn what_only_looks_like_a_leftover_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mine = [
            "hf.tmp-mine",
            "hf.replaced-old",
            "hf.tmp-1-2",
            "hf.replaced-1-2",
        ];
        for name in mine {
            let mine = dir.path().join(name);
            fs::create_dir(&mine).unwrap();
            fs::write(mine.join("tokenizer.json"), "years").unwrap();
        }
        restore(dir.path()).unwrap();
        for name in mine {
            assert_eq!(tokenizer(&dir.path().join(name)), "years", "{name}");
        }
        assert!(!dir.path().join(ASSETS).exists());
    }
}
