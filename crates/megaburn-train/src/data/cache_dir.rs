//! The folder of what is computed from data sets once per host.

use std::path::{Path, PathBuf};

use megaburn_data::{DataError, default_cache_dir};

use crate::config::DataConfig;

/// `data.cache_dir`, or the default.
///
/// # Errors
/// `data.cache_dir` is not set, and there is no home folder; `path` needs the cache.
pub(super) fn cache_dir(path: &Path, config: &DataConfig) -> Result<PathBuf, DataError> {
    let chosen = config.cache_dir.as_ref().map(PathBuf::from);
    let folder = chosen.or_else(default_cache_dir);
    folder.ok_or_else(|| DataError::NoCacheDir { path: path.into() })
}
