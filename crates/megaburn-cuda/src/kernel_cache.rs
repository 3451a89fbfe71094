//! Caches compiled kernels on disk, so that later processes need not compile them.

use std::{env, path::PathBuf, sync::Once};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// The environment variable that controls the cache:
///
/// - `0`: every process compiles its kernels.
/// - a folder: the cache is stored there.
/// - otherwise: the folder in CubeCL's configuration, which is `target/environment` in a Cargo
///   workspace and the user's cache folder elsewhere.
pub const VARIABLE: &str = "MEGABURN_KERNEL_CACHE";

/// The setting in the variable.
#[derive(Debug, PartialEq, Eq)]
enum KernelCacheMode {
    Off,
    Default,
    Folder(PathBuf),
}

impl KernelCacheMode {
    fn of(value: Option<&str>) -> Self {
        match value {
            None | Some("" | "1") => Self::Default,
            Some("0") => Self::Off,
            Some(folder) => Self::Folder(folder.into()),
        }
    }
}

/// Turns the cache on in CubeCL's configuration. Its other settings are read from `cubecl.toml` and
/// the environment as usual, except for `compilation.cache`, which the variable replaces. A program
/// that has set the configuration itself keeps its own.
pub(crate) fn turn_on() {
    static ONCE: Once = Once::new();
    ONCE.call_once(set);
}

fn set() {
    let asked = KernelCacheMode::of(env::var(VARIABLE).ok().as_deref());
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = asked != KernelCacheMode::Off;
    if let KernelCacheMode::Folder(folder) = asked {
        config.environment.path = CacheConfig::Directory(folder);
    }
    if !CubeClRuntimeConfig::try_set(config) {
        tracing::debug!(
            "the program has set CubeCL's configuration itself: {VARIABLE} has no \
                        effect"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_any_value_but_a_switch() {
        assert_eq!(KernelCacheMode::of(None), KernelCacheMode::Default);
        assert_eq!(KernelCacheMode::of(Some("1")), KernelCacheMode::Default);
        assert_eq!(KernelCacheMode::of(Some("0")), KernelCacheMode::Off);
        assert_eq!(
            KernelCacheMode::of(Some("/scratch/k")),
            KernelCacheMode::Folder("/scratch/k".into())
        );
    }
}
