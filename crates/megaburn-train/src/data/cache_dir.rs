//! The folder of what is computed from data sets once per host.

use std::env;
use std::path::{Path, PathBuf};

use megaburn_data::DataError;

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

/// `$XDG_CACHE_HOME/megaburn`, or `~/.cache/megaburn`.
fn default_cache_dir() -> Option<PathBuf> {
    let of = |name| env::var_os(name).filter(|value| !value.is_empty());
    let caches = of("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = caches.or_else(|| Some(PathBuf::from(of("HOME")?).join(".cache")));
    Some(caches?.join("megaburn"))
}
