//! Deletes a checkpoint.

use std::{fs, path::Path};

use crate::{
    error::{CheckpointError, IoContext},
    owner::Mark,
    paths::{TRASH, sibling_path},
    unfinished::remove_marked,
};

/// Deletes a checkpoint. It is renamed first, so that a kill in the middle leaves no partial
/// checkpoint under a checkpoint's name.
pub(crate) fn remove_checkpoint(path: &Path) -> Result<(), CheckpointError> {
    if path.is_symlink() {
        return fs::remove_file(path).during("remove the link", path);
    }
    Mark::of_run(path).during("write into", path)?;
    let trash = sibling_path(path, TRASH);
    fs::rename(path, &trash).during("move aside", path)?;
    remove_marked(&trash);
    Ok(())
}
