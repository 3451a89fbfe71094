//! Replaces small files atomically.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use crate::paths::{TMP, parent, sibling_path, sync_folder};

/// Writes `bytes` to `path`. A reader, also after a crash or a power loss, finds either the old
/// contents or all of `bytes`.
///
/// The bytes are written to a temporary file in the same folder (`NAME.tmp-…`), which is synced and
/// renamed. The temporary file is left behind only if the process is killed. If `path` is a
/// symbolic link, the file that it points to is replaced.
///
/// # Errors
/// The file cannot be written, for instance because the disk is full. Then `path` is unchanged and
/// no temporary file is left. If only the folder cannot be synced, `path` already holds the new
/// bytes.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if target.file_name().is_none() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let staging = sibling_path(&target, TMP);
    let write = || {
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .open(&staging)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&staging, &target)
    };
    write().inspect_err(|_| {
        // The first error is the one to report; there may be no file to remove.
        let _ = fs::remove_file(&staging);
    })?;
    sync_folder(parent(&target))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::names;

    #[test]
    fn a_file_is_made_and_replaced_and_nothing_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        for text in ["first", "second and longer", ""] {
            write_atomic(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(names(dir.path()), ["config.toml"]);
        }
    }

    #[test]
    fn a_link_stays_and_its_file_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let [elsewhere, link] = ["elsewhere", "link"].map(|name| dir.path().join(name));
        fs::write(&elsewhere, "old").unwrap();
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        write_atomic(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "new");
    }

    #[test]
    fn a_failure_leaves_what_stood_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("folder");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("x"), "kept").unwrap();
        write_atomic(&path, b"a file does not replace a folder").unwrap_err();
        assert_eq!(fs::read_to_string(path.join("x")).unwrap(), "kept");
        assert_eq!(names(dir.path()), ["folder"]);
        let error = write_atomic(&dir.path().join("absent/file"), b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert_eq!(names(dir.path()), ["folder"]);
    }
}
