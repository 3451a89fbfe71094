//! The folders in which the dynamic loader searches for a library by name.

use std::{fs, path::PathBuf};

use super::Machine;

/// The folders in the loader's order: `LD_LIBRARY_PATH`, the cache of `ldconfig`, and the system's
/// folders.
pub(super) fn folders(machine: &Machine, library: &str) -> Vec<PathBuf> {
    let mut folders = machine.paths("LD_LIBRARY_PATH");
    folders.extend(cached(machine, library));
    let arch = std::env::consts::ARCH;
    for folder in ["/lib64", "/usr/lib64", "/lib", "/usr/lib"] {
        folders.push(machine.system(&format!("{folder}/{arch}-linux-gnu")));
        folders.push(machine.system(folder));
    }
    folders
}

/// The folders in which `/etc/ld.so.cache` lists the library. The paths in the cache are
/// zero-terminated.
fn cached(machine: &Machine, library: &str) -> Vec<PathBuf> {
    let cache = fs::read(machine.system("/etc/ld.so.cache")).unwrap_or_default();
    let texts = cache
        .split(|byte| *byte == 0)
        .filter_map(|text| std::str::from_utf8(text).ok());
    let paths = texts
        .filter(|text| text.starts_with('/'))
        .map(|path| machine.system(path));
    paths
        .filter(|path| path.file_name().is_some_and(|name| name == library))
        .filter_map(|path| path.parent().map(PathBuf::from))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_cache_names_folders() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("etc")).unwrap();
        let cache =
            b"glibc-ld.so.cache1.1\x02\0\0\0libnccl.so.2\0/opt/n/libnccl.so.2\0/opt/n/libnccl.so\0";
        fs::write(root.join("etc/ld.so.cache"), cache).unwrap();
        let machine = Machine::described(root, &[]);
        assert_eq!(cached(&machine, "libnccl.so.2"), [root.join("opt/n")]);
        assert!(cached(&machine, "libcudnn.so.9").is_empty());
    }

    #[test]
    fn this_machines_own_libraries_are_found() {
        let folders = folders(&Machine::this(), "libc.so.6");
        assert!(
            folders
                .iter()
                .any(|folder| folder.join("libc.so.6").is_file()),
            "{folders:?}"
        );
    }
}
