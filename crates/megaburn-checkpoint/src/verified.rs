use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The checkpoints that the ranks of this process have fully verified, and whether each was intact.
static VERIFIED: Mutex<BTreeMap<PathBuf, bool>> = Mutex::new(BTreeMap::new());

/// For each of these checkpoints, whether it is intact.
pub(crate) fn verified() -> MutexGuard<'static, BTreeMap<PathBuf, bool>> {
    VERIFIED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records whether a checkpoint is intact.
pub(crate) fn remember(path: &Path, is_whole: bool) {
    verified().insert(path.to_path_buf(), is_whole);
}
