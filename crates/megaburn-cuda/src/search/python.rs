//! Finds the folders into which Python installs packages.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::Machine;

/// The `site-packages` folders in `PYTHONPATH`, and those of the active environment, of the
/// `python3` in `PATH`, of the user and of the system. They need not exist.
pub(super) fn site_packages(machine: &Machine) -> Vec<PathBuf> {
    let mut folders = machine.paths("PYTHONPATH");
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .into_iter()
        .filter_map(|name| machine.variable(name));
    let mut prefixes: Vec<PathBuf> = active.map(PathBuf::from).collect();
    prefixes.extend(prefixes_in_path(machine));
    prefixes.extend(machine.variable("PYTHONUSERBASE").map(PathBuf::from));
    prefixes.extend(
        machine
            .variable("HOME")
            .map(|home| Path::new(home).join(".local")),
    );
    prefixes.extend(["/usr/local", "/usr"].map(|prefix| machine.system(prefix)));
    folders.extend(prefixes.iter().flat_map(|prefix| of_prefix(prefix)));
    folders
}

/// The folder `nvidia` in the `site-packages` that contains one of NVIDIA's wheels.
pub(super) fn site_packages_beside(wheel: &Path) -> Option<PathBuf> {
    let wheel = if wheel.ends_with("..") {
        wheel.parent()?.parent()?
    } else {
        wheel
    };
    let root = wheel.parent()?;
    root.ends_with("nvidia").then(|| root.to_path_buf())
}

/// `PREFIX/lib/python3.N/site-packages`, the newest Python first.
fn of_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for lib in ["lib", "lib64"] {
        let entries = fs::read_dir(prefix.join(lib))
            .into_iter()
            .flatten()
            .flatten();
        let pythons = entries.map(|entry| entry.path()).filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("python3"))
        });
        let mut pythons: Vec<PathBuf> = pythons.collect();
        pythons.sort_by_key(|path| {
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            std::cmp::Reverse(
                name.rsplit('.')
                    .next()
                    .and_then(|minor| minor.parse::<u32>().ok()),
            )
        });
        for packages in ["site-packages", "dist-packages"] {
            folders.extend(pythons.iter().map(|python| python.join(packages)));
        }
    }
    folders
}

/// The prefixes of the `python3` in `PATH`; for a virtual environment also that of its base Python.
fn prefixes_in_path(machine: &Machine) -> Vec<PathBuf> {
    let programs = machine
        .paths("PATH")
        .into_iter()
        .map(|folder| folder.join("python3"));
    let Some(python) = programs.into_iter().find(|program| program.is_file()) else {
        return Vec::new();
    };
    if is_script(&python) {
        return asked(&python);
    }
    let mut prefixes = Vec::new();
    let mut link = Some(python);
    // Follow at most 40 links, as Linux does.
    while let Some(program) = link.filter(|_| prefixes.len() < 40) {
        let folder = program.parent().unwrap_or(Path::new("/"));
        prefixes.extend(folder.parent().map(Path::to_path_buf));
        link = fs::read_link(&program)
            .ok()
            .map(|target| folder.join(target));
    }
    prefixes
}

/// Whether a program is a script that starts another program, as the shims of pyenv and asdf do.
fn is_script(program: &Path) -> bool {
    let mut start = [0; 2];
    let read = fs::File::open(program).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && &start == b"#!"
}

/// Runs a Python to get its prefixes; returns nothing if it takes more than five seconds.
fn asked(python: &Path) -> Vec<PathBuf> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const SCRIPT: &str = "import sys; print(sys.prefix); print(sys.base_prefix)";
    let mut command = Command::new(python);
    command
        .args(["-I", "-c", SCRIPT])
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let Ok(mut child) = command.stdout(Stdio::piped()).spawn() else {
        return Vec::new();
    };
    let until = Instant::now() + PATIENCE;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > until {
            tracing::warn!(
                "`{}` does not answer; its packages are not searched",
                python.display()
            );
            // The process may have ended in the meantime.
            let _ = child.kill();
            let _ = child.wait();
            return Vec::new();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    let read = child
        .stdout
        .take()
        .map(|mut stdout| stdout.read_to_string(&mut text));
    if !matches!(read, Some(Ok(_))) {
        return Vec::new();
    }
    text.lines()
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn machine_with_path(root: &Path) -> Machine {
        let path = root.join("bin").display().to_string();
        Machine::described(root, &[("PATH", &path)])
    }

    #[test]
    fn a_python_in_path_is_followed_to_where_it_lives() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for bin in [
            "bin",
            "torch/venv/bin",
            "usr/bin",
            "torch/venv/lib/python3.12",
            "usr/lib/python3.12",
        ] {
            fs::create_dir_all(root.join(bin)).unwrap();
        }
        fs::write(root.join("usr/bin/python3.12"), b"\x7fELF").unwrap();
        symlink(
            "../../../usr/bin/python3.12",
            root.join("torch/venv/bin/python3"),
        )
        .unwrap();
        symlink(
            root.join("torch/venv/bin/python3"),
            root.join("bin/python3"),
        )
        .unwrap();
        let found = site_packages(&machine_with_path(root));
        let has = |site: &str| {
            let site = root.join(site);
            found.iter().any(|found| {
                // Compare the parents, because the packages folder itself does not exist.
                let parent = |path: &Path| path.parent().unwrap().canonicalize().ok();
                found.file_name() == site.file_name() && parent(found) == parent(&site)
            })
        };
        assert!(has("torch/venv/lib/python3.12/site-packages"), "{found:?}");
        assert!(has("usr/lib/python3.12/site-packages"), "{found:?}");
    }

    #[test]
    fn a_python_that_is_a_script_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::create_dir_all(root.join("versions/lib/python3.9")).unwrap();
        let shim = root.join("bin/python3");
        let script = format!(
            "#!/bin/sh\necho {0}\necho {0}\n",
            root.join("versions").display()
        );
        fs::write(&shim, script).unwrap();
        fs::set_permissions(&shim, fs::Permissions::from_mode(0o755)).unwrap();
        let found = site_packages(&machine_with_path(root));
        assert!(
            found.contains(&root.join("versions/lib/python3.9/site-packages")),
            "{found:?}"
        );
    }

    #[test]
    fn the_newest_python_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        for python in ["python3.9", "python3.12", "python3.10", "perl5"] {
            fs::create_dir_all(folder.path().join("lib").join(python)).unwrap();
        }
        let found = of_prefix(folder.path());
        let expected = ["3.12", "3.10", "3.9"].map(|minor| {
            folder
                .path()
                .join(format!("lib/python{minor}/site-packages"))
        });
        assert_eq!(found[..3], expected);
    }
}
