//! Compiled kernels on disk: what NVIDIA's compiler made of a kernel in one process serves the next.

use std::{env, path::PathBuf, sync::Once};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

/// `0`: kernels are compiled anew in each process. A folder: they lie there. Otherwise, in that of
/// CubeCL's configuration: `target/environment` in a Cargo workspace, the user's cache folder elsewhere.
pub const VARIABLE: &str = "MEGABURN_KERNEL_CACHE";

/// What the variable asks for.
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

/// Turns the cache on in CubeCL's configuration, whose other settings are read from `cubecl.toml` and the
/// environment as ever (`compilation.cache` is not: the variable has its place). A program that has set the
/// configuration itself keeps its own.
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
        tracing::debug!("CubeCL's configuration is the program's own: {VARIABLE} has no effect");
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
