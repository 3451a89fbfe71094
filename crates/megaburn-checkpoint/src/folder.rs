//! The folder of checkpoints: names, what is committed, leftovers, retention.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use megaburn_collective::Group;

use crate::{CheckpointError, agree::settle, error::IoContext};

/// Suffixes of names that are no checkpoint: being written, on its way out, replaced by a
/// checkpoint of the same step.
const TMP: &str = ".tmp-";
const TRASH: &str = ".trash-";
const REPLACED: &str = ".replaced-";

/// Makes the folder if there is none and removes what a crash left behind. Call it when a run
/// starts, before loading or saving.
///
/// # Errors
/// The folder cannot be made or read, on any rank.
/// # Collective
/// All ranks of `world`; rank 0 works.
pub fn prepare(dir: &Path, world: &Group) -> Result<(), CheckpointError> {
    let mine = if world.rank() == 0 { clean(dir) } else { Ok(()) };
    settle(world, mine)
}

/// Removes every checkpoint and leftover of one in the folder; what else it holds stays.
///
/// # Errors
/// One cannot be removed, on any rank.
/// # Collective
/// All ranks of `world`; rank 0 works.
pub fn clear(dir: &Path, world: &Group) -> Result<(), CheckpointError> {
    let remove = || {
        clean(dir)?;
        committed(dir)?.into_iter().try_for_each(|(_, path)| {
            fs::remove_dir_all(&path).during("remove the checkpoint", &path)
        })
    };
    settle(world, if world.rank() == 0 { remove() } else { Ok(()) })
}

fn clean(dir: &Path) -> Result<(), CheckpointError> {
    fs::create_dir_all(dir).during("make the folder", dir)?;
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        sync_dir(parent)?;
    }
    for (name, path) in entries(dir)? {
        let Some((step, _)) = name.split_once('.').filter(|(step, _)| parse_step(step).is_some())
        else {
            continue;
        };
        // A crash between the two renames of a replacement leaves only the old checkpoint.
        if name.contains(REPLACED) && !dir.join(step).exists() {
            fs::rename(&path, dir.join(step)).during("restore", &path)?;
        } else if [TMP, TRASH, REPLACED].iter().any(|suffix| name.contains(suffix)) {
            fs::remove_dir_all(&path).during("remove the leftover", &path)?;
        }
    }
    sync_dir(dir)
}

/// Committed checkpoints, newest first. Whether they are whole is not looked at.
pub(crate) fn committed(dir: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let steps = entries(dir)?.into_iter();
    let mut found: Vec<_> =
        steps.filter_map(|(name, path)| Some((parse_step(&name)?, path))).collect();
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// A new folder for a checkpoint in the making; removed when dropped before its commit.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) path: PathBuf,
    committed: bool,
}

impl Staging {
    pub(crate) fn create(dir: &Path, step: u64) -> Result<Self, CheckpointError> {
        fs::create_dir_all(dir).during("make the folder", dir)?;
        let path = dir.join(format!("{}{TMP}{}", step_name(step), unique()));
        fs::create_dir(&path).during("make the folder", &path)?;
        Ok(Self { path, committed: false })
    }

    /// Gives it its final name: from here on it is the newest checkpoint, whatever happens.
    pub(crate) fn commit(mut self, step: u64) -> Result<(), CheckpointError> {
        let dir = self.path.parent().expect("it was made inside a folder").to_path_buf();
        let target = step_path(&dir, step);
        let old = dir.join(format!("{}{REPLACED}{}", step_name(step), unique()));
        let replaces = target.exists();
        if replaces {
            fs::rename(&target, &old).during("move aside", &target)?;
        }
        if let Err(error) = fs::rename(&self.path, &target).during("rename", &self.path) {
            if replaces {
                fs::rename(&old, &target).during("restore", &old)?;
            }
            return Err(error);
        }
        self.committed = true;
        sync_dir(&dir)?;
        if replaces {
            discard(&old);
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.committed {
            discard(&self.path);
        }
    }
}

/// Keeps the newest `keep` checkpoints up to `current` (0 keeps all). Later ones are of another
/// past of the run and are not touched.
pub(crate) fn retain(dir: &Path, current: u64, keep: usize) -> Result<(), CheckpointError> {
    let past = committed(dir)?.into_iter().filter(|(step, _)| *step <= current);
    for (step, path) in past.skip(if keep == 0 { usize::MAX } else { keep }) {
        // Deleting takes time: what is half deleted must not look like a checkpoint.
        let trash = dir.join(format!("{}{TRASH}{}", step_name(step), unique()));
        fs::rename(&path, &trash).during("move aside", &path)?;
        discard(&trash);
    }
    Ok(())
}

/// Removes a folder that nobody needs; what stays behind is removed by the next [`prepare`].
fn discard(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!("cannot remove {}: {error}", path.display());
    }
}

/// Makes the names in a folder survive a power loss.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).during("sync the folder", dir)
}

fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, CheckpointError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).during("read the folder", dir)? {
        let entry = entry.during("read the folder", dir)?;
        if entry.path().is_dir() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    Ok(found)
}

/// Where the checkpoint of a step stands.
pub(crate) fn step_path(dir: &Path, step: u64) -> PathBuf {
    dir.join(step_name(step))
}

fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

fn parse_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

fn unique() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", process::id(), since.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(dir: &Path, names: &[&str]) {
        for name in names {
            fs::create_dir_all(dir.join(name)).unwrap();
            fs::write(dir.join(name).join("x"), name).unwrap();
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = entries(dir).unwrap().into_iter().map(|(name, _)| name).collect();
        names.sort();
        names
    }

    #[test]
    fn leftovers_are_removed_and_other_files_stay() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        make(here, &["step-00000001", "step-00000002.tmp-1-2", "step-00000001.trash-7", "notes"]);
        make(here, &["step-00000001.replaced-1", "step-00000009.replaced-1", "other.tmp-1"]);
        prepare(here, &Group::single(0)).unwrap();
        assert_eq!(names(here), ["notes", "other.tmp-1", "step-00000001", "step-00000009"]);
        let restored = fs::read_to_string(here.join("step-00000009/x")).unwrap();
        assert_eq!(restored, "step-00000009.replaced-1");
    }

    #[test]
    fn retention_keeps_the_newest_and_never_the_later() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        make(here, &["step-00000010", "step-00000020", "step-00000030", "step-00000040"]);
        make(here, &["step-5", "step-123456789"]);
        retain(here, 30, 0).unwrap();
        assert_eq!(committed(here).unwrap().len(), 5);
        retain(here, 30, 2).unwrap();
        let steps: Vec<u64> = committed(here).unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [123456789, 40, 30, 20]);
        assert_eq!(names(here).len(), 5);
    }

    #[test]
    fn an_uncommitted_folder_disappears_and_a_committed_one_replaces_its_step() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        drop(Staging::create(here, 3).unwrap());
        assert_eq!(names(here), [""; 0]);
        for text in ["first", "second"] {
            let staging = Staging::create(here, 3).unwrap();
            fs::write(staging.path.join("x"), text).unwrap();
            staging.commit(3).unwrap();
            assert_eq!(fs::read_to_string(step_path(here, 3).join("x")).unwrap(), text);
            assert_eq!(names(here), ["step-00000003"]);
        }
    }
}
