//! Reads what a host offers to a process.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    thread,
};

use nix::sys::statvfs::statvfs;

use crate::{
    facts::{HostFacts, Limit},
    kernel_log,
};

/// The variables that are reported: these, and all that begin with one of [`PREFIXES`].
const VARIABLES: [&str; 9] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_PATH",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MEGABURN_CUDNN",
    "OMP_NUM_THREADS",
    "RAYON_NUM_THREADS",
];
const PREFIXES: [&str; 2] = ["NCCL_", "UCX_"];

/// Reads the facts of this host for one of its `ranks` ranks.
pub(crate) fn read(ranks: usize) -> HostFacts {
    let variables = std::env::vars_os().map(|(name, value)| {
        let text = |of: std::ffi::OsString| of.to_string_lossy().into_owned();
        (text(name), text(value))
    });
    HostFacts {
        cores: thread::available_parallelism().map_or(1, usize::from),
        ranks,
        xids: kernel_log::xids(),
        ..below(Path::new("/"), variables)
    }
}

/// The facts that stand in files below `root` and in `variables`.
fn below(root: &Path, variables: impl Iterator<Item = (String, String)>) -> HostFacts {
    let environment: BTreeMap<String, String> = variables
        .filter(|(name, _)| {
            VARIABLES.contains(&name.as_str())
                || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        })
        .collect();
    let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let memory = text("proc/meminfo");
    let limits = text("proc/self/limits");
    let of_host = kib(&memory, "MemAvailable:");
    let of_container = left_in_container(root);
    let shm = statvfs(&root.join("dev/shm")).ok();
    HostFacts {
        rayon_threads: environment.get("RAYON_NUM_THREADS").cloned(),
        memory_bytes: kib(&memory, "MemTotal:"),
        available_bytes: match (of_host, of_container) {
            (Some(host), Some(container)) => Some(host.min(container)),
            (host, container) => host.or(container),
        },
        open_files: soft_limit(&limits, "Max open files"),
        locked_bytes: soft_limit(&limits, "Max locked memory"),
        shm_bytes: shm.map(|shm| shm.blocks() * shm.fragment_size()),
        shm_free_bytes: shm.map(|shm| shm.blocks_available() * shm.fragment_size()),
        environment,
        ..HostFacts::default()
    }
}

/// The bytes of a line such as `MemTotal:  24610892 kB`.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    let number: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    number.checked_mul(1024)
}

/// The soft limit in a line such as `Max open files  1024  1048576  files`.
fn soft_limit(text: &str, name: &str) -> Option<Limit> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        number => number.parse().ok().map(Limit::Of),
    }
}

/// What the container of this process may still allocate (version 2 of cgroups, mounted as its
/// root); `None` without a limit.
fn left_in_container(root: &Path) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let path: PathBuf = root.join("sys/fs/cgroup").join(name);
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let limit = number("memory.max")?;
    Some(limit.saturating_sub(number("memory.current").unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_memory_and_limits() {
        let found = read(1);
        assert!(found.cores > 0 && found.memory_bytes > found.available_bytes.map(|_| 0));
        assert!(found.open_files.is_some() && found.locked_bytes.is_some());
        assert!(found.available_bytes.is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn only_variables_without_secrets_are_reported() {
        let variables = [
            ("NCCL_DEBUG", "INFO"),
            ("MEGABURN_JOB_TOKEN", "s3cret"),
            ("RAYON_NUM_THREADS", "4"),
        ];
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let found = below(Path::new("/nowhere"), variables.into_iter());
        assert_eq!(found.environment.len(), 2);
        assert_eq!(found.rayon_threads.as_deref(), Some("4"));
        assert_eq!(found.available_bytes, None);
    }

    #[test]
    fn numbers_are_read_as_the_kernel_writes_them() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         8388608              \
             8388608              bytes\nMax open files            unlimited  1048576  files\n";
        assert_eq!(
            soft_limit(limits, "Max locked memory"),
            Some(Limit::Of(8 << 20))
        );
        assert_eq!(soft_limit(limits, "Max open files"), Some(Limit::Unlimited));
        assert_eq!(kib("MemTotal:  8 kB\n", "MemTotal:"), Some(8192));
        assert_eq!(kib("MemTotal:", "MemTotal:"), None);
    }
}
