//! Writes a folder of another kind than a checkpoint, complete or not at all.

use std::path::Path;

use crate::{error::CheckpointError, paths::is_there, target::Target};

/// Makes the folder `path`, which must not exist, with what `write` writes into a temporary folder
/// next to it. `what` says in errors what it is.
///
/// # Errors
/// Something exists at `path`, `write` fails, or the disk is full. Then nothing of the new folder
/// remains. Only a kill leaves the temporary folder behind, which the next call removes.
pub fn write_folder<E: From<CheckpointError>>(
    path: &Path,
    what: &'static str,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let target = Target {
        path,
        force: false,
        what,
        mark: what,
        is_part: |_| false,
    };
    let check = || match is_there(path) {
        true => Err(CheckpointError::NewOnly {
            path: path.into(),
            what,
        }),
        false => Ok(()),
    };
    check()?;
    let staging = target.stage()?;
    write(&staging.path)?;
    check()?;
    Ok(target.commit(staging)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::names;

    #[test]
    fn a_folder_is_there_as_a_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("above/out");
        let write = |fails: bool| {
            write_folder(&path, "run", |folder| {
                fs::write(folder.join("a"), "1").unwrap();
                assert!(!path.exists());
                match fails {
                    true => Err(CheckpointError::Missing { file: "a".into() }),
                    false => Ok(()),
                }
            })
        };
        write(true).unwrap_err();
        assert_eq!(names(dir.path()), [""; 0]);
        write(false).unwrap();
        assert_eq!(names(&path), ["a"]);
        let error = write(false).unwrap_err().to_string();
        assert!(
            error.contains("out exists, so no run is written there"),
            "{error}"
        );
        assert_eq!(names(&dir.path().join("above")), ["out"]);
    }
}
