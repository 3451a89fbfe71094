//! Temporary names next to a path, and how a later process recognizes them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    error::{CheckpointError, IoContext},
    owner::pid_of,
};

/// In the name of a file or folder that is being written and does not have its final name yet.
pub const TMP: &str = ".tmp-";
/// In the name of a folder that was replaced by another.
pub const REPLACED: &str = ".replaced-";
/// At the end of the name of a file that is being copied from another host.
pub(crate) const PART: &str = ".part";
/// In the name of a checkpoint that is being deleted.
pub(crate) const TRASH: &str = ".trash-";

/// Returns a new name in the same folder: `NAME`, the suffix, then this process's id and the time
/// in hexadecimal.
pub fn sibling_path(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target
        .file_name()
        .expect("a target has a file name")
        .to_os_string();
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    name.push(format!(
        "{suffix}{:x}-{:x}",
        process::id(),
        since.as_nanos()
    ));
    parent(target).join(name)
}

/// Splits a name that [`sibling_path`] made with one of the suffixes above into `NAME` and the
/// suffix. A killed program leaves such names behind. A folder is a leftover only if it also has
/// the program's mark, so a user's `NAME.tmp-copy` is never mistaken for one.
pub fn leftover_of(name: &str) -> Option<(&str, &'static str)> {
    [TMP, REPLACED, TRASH].into_iter().find_map(|suffix| {
        let (of, unique) = name.rsplit_once(suffix)?;
        pid_of(unique).map(|_| (of, suffix))
    })
}

/// Whether something exists at a path, including a broken link. A path that cannot be accessed
/// counts as existing.
pub fn is_there(path: &Path) -> bool {
    match fs::symlink_metadata(path) {
        Ok(_) => true,
        Err(error) => !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        ),
    }
}

/// Makes the names in a folder survive a power loss.
///
/// # Errors
/// The folder cannot be opened or synced.
pub fn sync_folder(dir: &Path) -> io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

/// Like [`sync_folder`], with an error that names the folder.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    sync_folder(dir).during("sync the folder", dir)
}

/// The folder that contains a path.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_program_has_made_are_those_of_leftovers() {
        for suffix in [TMP, REPLACED, TRASH] {
            let made = sibling_path(Path::new("a/step-00000001"), suffix);
            let name = made.file_name().unwrap().to_str().unwrap();
            assert_eq!(leftover_of(name), Some(("step-00000001", suffix)));
        }
        assert_eq!(
            leftover_of("config.toml.tmp-1f-2a"),
            Some(("config.toml", TMP))
        );
        let others = [
            "config.toml",
            "step-00000001.replaced-good",
            "step-00000001.tmp-copy",
        ];
        for name in others
            .into_iter()
            .chain(["a.tmp-1-", "a.tmp-1-2-3", "a.tmp-1-2.bak"])
        {
            assert_eq!(leftover_of(name), None, "{name}");
        }
    }
}
