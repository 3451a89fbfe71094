//! A target path from the user: what may be replaced there, and leftovers of interrupted
//! conversions to it.

use std::{fs, path::Path};

use crate::{
    atomic_dir::AtomicDir,
    error::{CheckpointError, IoContext},
    owner::OWNER,
    paths::{is_there, sync_dir},
    sweep::sweep,
};

/// The target folder of a result, as named by the user, and what may be replaced there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) path: &'a Path,
    /// Whether an existing result may be replaced.
    pub(crate) force: bool,
    /// What kind of result it is, and the file that identifies it.
    pub(crate) what: &'static str,
    pub(crate) mark: &'static str,
    /// The names that such a result may have in its folder; any other name is a user's file.
    pub(crate) is_part: fn(&str) -> bool,
}

impl Target<'_> {
    /// Creates a folder that will become the target.
    ///
    /// # Errors
    /// The target exists and is not to be replaced, or is not such a result; no other folder is
    /// ever deleted.
    pub(crate) fn stage(&self) -> Result<AtomicDir, CheckpointError> {
        // For `out/..` or a link, use the folder itself.
        let whole = || fs::canonicalize(self.path).unwrap_or_else(|_| self.path.to_path_buf());
        if let Err(error) = sweep(&whole(), |folder| self.kind(folder).is_ok()) {
            tracing::warn!("leftovers of interrupted conversions may remain: {error}");
        }
        self.check()?;
        let path = whole();
        if path.file_name().is_none() {
            let what = self.what;
            let why = format!("it has no `{}`", self.mark);
            return Err(CheckpointError::NotReplaced { path, what, why });
        }
        AtomicDir::create_owned(&path)
    }

    /// Checks the target a second time, because writing took a while, and renames the new folder to
    /// it.
    pub(crate) fn commit(&self, staging: AtomicDir) -> Result<(), CheckpointError> {
        self.check()?;
        sync_dir(&staging.path)?;
        staging.commit()
    }

    fn check(&self) -> Result<(), CheckpointError> {
        if !is_there(self.path) {
            return Ok(());
        }
        if !self.force {
            return Err(CheckpointError::Exists {
                path: self.path.to_path_buf(),
            });
        }
        self.kind(self.path)
    }

    /// Refuses a folder that is neither empty nor such a result.
    fn kind(&self, path: &Path) -> Result<(), CheckpointError> {
        let Self {
            what,
            mark,
            is_part,
            ..
        } = *self;
        let refuse = |why: String| {
            Err(CheckpointError::NotReplaced {
                path: path.to_path_buf(),
                what,
                why,
            })
        };
        if !path.is_dir() {
            return refuse("it is not a folder".into());
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(path).during("read the folder", path)? {
            let entry = entry.during("read the folder", path)?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != OWNER);
        if !(names.is_empty() || path.join(mark).is_file()) {
            return refuse(format!("it has no `{mark}`"));
        }
        match names.iter().find(|name| !is_part(name)) {
            Some(name) => refuse(format!("`{name}` does not belong to one")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::names;

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
            refused(true).contains("not just a checkpoint (it has no `mark`)"),
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
        assert!(
            refused(true).contains("`thesis.tex` does not belong to one"),
            "{}",
            refused(true)
        );
        fs::remove_file(path.join("thesis.tex")).unwrap();
        written.commit(written.stage().unwrap()).unwrap();
        assert_eq!(names(&path), [""; 0]);
        assert_eq!(names(dir.path()), ["out"]);
    }
}
