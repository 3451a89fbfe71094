//! A folder that appears whole under its name or not at all.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{CheckpointError, error::IoContext};

/// Suffixes of names that stand for no result: being written, and replaced by a new folder.
pub(crate) const TMP: &str = ".tmp-";
pub(crate) const REPLACED: &str = ".replaced-";

/// A folder in the making beside the one that it will become; removed when dropped before its
/// commit.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) path: PathBuf,
    target: PathBuf,
    /// Folders above it that were made for it, innermost first.
    made: Vec<PathBuf>,
    committed: bool,
}

impl Staging {
    /// For a folder that will stand at `target`, whose parents are made where they are missing.
    pub(crate) fn create(target: &Path) -> Result<Self, CheckpointError> {
        let is_missing = |above: &&Path| !above.as_os_str().is_empty() && !is_there(above);
        let made = parent(target).ancestors().take_while(is_missing);
        let made = made.map(Path::to_path_buf).collect();
        let path = beside(target, TMP);
        let staging = Self { path, target: target.to_path_buf(), made, committed: false };
        fs::create_dir_all(staging.parent()).during("make the folder", staging.parent())?;
        fs::create_dir(&staging.path).during("make the folder", &staging.path)?;
        Ok(staging)
    }

    /// The same in a folder that must be there already.
    pub(crate) fn inside(target: &Path) -> Result<Self, CheckpointError> {
        let path = beside(target, TMP);
        fs::create_dir(&path).during("make the folder", &path)?;
        Ok(Self { path, target: target.to_path_buf(), made: Vec::new(), committed: false })
    }

    /// Gives it its final name; what stands there is replaced. From here on it is the result,
    /// whatever happens.
    pub(crate) fn commit(mut self) -> Result<(), CheckpointError> {
        let target = self.target.clone();
        let old = beside(&target, REPLACED);
        let replaces = is_there(&target);
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
        sync_dir(self.parent())?;
        for made in &self.made {
            sync_dir(parent(made))?;
        }
        if replaces {
            discard(&old);
        }
        Ok(())
    }

    fn parent(&self) -> &Path {
        parent(&self.target)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.committed {
            return;
        }
        if is_there(&self.path) {
            discard(&self.path);
        }
        for made in &self.made {
            // Somebody else may have put something into it.
            let _ = fs::remove_dir(made);
        }
    }
}

/// A folder that a user named as the place of a result, and what may be replaced there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) path: &'a Path,
    /// Whether a result that stands there may be replaced.
    pub(crate) force: bool,
    /// What such a result is, and the file by which one knows it.
    pub(crate) what: &'static str,
    pub(crate) mark: &'static str,
    /// The names that such a result may have in its folder: anything else is somebody's own.
    pub(crate) is_part: fn(&str) -> bool,
}

impl Target<'_> {
    /// A folder that will become it.
    ///
    /// # Errors
    /// Something stands there and is not to be replaced, or is no such result: nobody's other
    /// folder is deleted.
    pub(crate) fn stage(&self) -> Result<Staging, CheckpointError> {
        self.check()?;
        // Of `out/..` or a link, the folder itself.
        let path = fs::canonicalize(self.path).unwrap_or_else(|_| self.path.to_path_buf());
        if path.file_name().is_none() {
            let (what, why) = (self.what, format!("it has no `{}`", self.mark));
            return Err(CheckpointError::NotReplaced { path, what, why });
        }
        Staging::create(&path)
    }

    /// Looks again, as writing took its time, and puts the new folder in place.
    pub(crate) fn commit(&self, staging: Staging) -> Result<(), CheckpointError> {
        self.check()?;
        sync_dir(&staging.path)?;
        staging.commit()
    }

    fn check(&self) -> Result<(), CheckpointError> {
        let Self { path, force, what, mark, is_part } = *self;
        if !is_there(path) {
            return Ok(());
        }
        if !force {
            return Err(CheckpointError::Exists { path: path.to_path_buf() });
        }
        let refuse =
            |why: String| Err(CheckpointError::NotReplaced { path: path.to_path_buf(), what, why });
        if !path.is_dir() {
            return refuse("it is no folder".into());
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(path).during("read the folder", path)? {
            let entry = entry.during("read the folder", path)?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        if !(names.is_empty() || path.join(mark).is_file()) {
            return refuse(format!("it has no `{mark}`"));
        }
        match names.iter().find(|name| !is_part(name)) {
            Some(name) => refuse(format!("`{name}` is no part of one")),
            None => Ok(()),
        }
    }
}

/// Whether the name is taken, by a broken link too.
fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// The folder that a path is in.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Another name in the same folder.
pub(crate) fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.file_name().expect("a target has a name").to_os_string();
    name.push(suffix);
    name.push(unique());
    parent(target).join(name)
}

/// Removes a folder that nobody needs; a warning if it cannot be removed.
pub(crate) fn discard(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!("cannot remove {}: {error}", path.display());
    }
}

/// Makes the names in a folder survive a power loss.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    fs::File::open(dir).and_then(|dir| dir.sync_all()).during("sync the folder", dir)
}

pub(crate) fn unique() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", process::id(), since.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn an_uncommitted_folder_disappears_and_a_committed_one_replaces_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-00000003");
        drop(Staging::create(&target).unwrap());
        assert_eq!(names(dir.path()), [""; 0]);
        for text in ["first", "second"] {
            let staging = Staging::create(&target).unwrap();
            fs::write(staging.path.join("x"), text).unwrap();
            staging.commit().unwrap();
            assert_eq!(fs::read_to_string(target.join("x")).unwrap(), text);
            assert_eq!(names(dir.path()), ["step-00000003"]);
        }
    }

    #[test]
    fn folders_that_were_made_above_it_disappear_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a/b/out");
        drop(Staging::create(&target).unwrap());
        assert_eq!(names(dir.path()), [""; 0]);
        Staging::create(&target).unwrap().commit().unwrap();
        assert!(target.is_dir());
        drop(Staging::create(&dir.path().join("a/c/out")).unwrap());
        assert_eq!(names(&dir.path().join("a")), ["b"]);
    }

    #[test]
    fn only_a_result_of_the_same_kind_or_an_empty_folder_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let target = |force| Target {
            path: &path,
            force,
            what: "checkpoint",
            mark: "mark",
            is_part: |name| name == "mark",
        };
        fs::create_dir(&path).unwrap();
        let refused = |force| target(force).stage().unwrap_err().to_string();
        assert!(refused(false).contains("--force"), "{}", refused(false));
        target(true).commit(target(true).stage().unwrap()).unwrap();

        fs::write(path.join("thesis.tex"), "years").unwrap();
        assert!(
            refused(true).contains("no checkpoint and nothing else (it has no `mark`)"),
            "{}",
            refused(true)
        );
        let written = target(true);
        fs::rename(path.join("thesis.tex"), path.join("mark")).unwrap();
        let staging = written.stage().unwrap();
        fs::rename(path.join("mark"), path.join("thesis.tex")).unwrap();
        written.commit(staging).unwrap_err();
        assert_eq!(names(&path), ["thesis.tex"]);
        fs::write(path.join("mark"), "").unwrap();
        assert!(refused(true).contains("`thesis.tex` is no part of one"), "{}", refused(true));
        fs::remove_file(path.join("thesis.tex")).unwrap();
        written.commit(written.stage().unwrap()).unwrap();
        assert_eq!(names(&path), [""; 0]);
        assert_eq!(names(dir.path()), ["out"]);
    }
}
