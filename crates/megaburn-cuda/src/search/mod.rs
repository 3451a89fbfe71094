//! Finds NVIDIA's libraries on this machine: in the loader's folders, in the CUDA toolkit, and in
//! Python wheels (`nvidia/NAME/lib` below a `site-packages`), in this order. It loads nothing.

mod loader;
mod python;
mod version;

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

pub(crate) use version::{Header, Version};

/// The parts of the machine that the search reads; tests describe their own machine.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// `/`, or the folder that replaces it in a test.
    root: PathBuf,
    variables: BTreeMap<OsString, OsString>,
}

impl Machine {
    /// The machine that this process runs on.
    pub(crate) fn this() -> Self {
        Self {
            root: "/".into(),
            variables: env::vars_os().collect(),
        }
    }

    /// A machine whose root folder is `root`.
    #[cfg(test)]
    pub(crate) fn described(root: &Path, variables: &[(&str, &str)]) -> Self {
        let pair = |&(name, value): &(&str, &str)| (name.into(), value.into());
        Self {
            root: root.into(),
            variables: variables.iter().map(pair).collect(),
        }
    }

    /// The value of a variable, if it is set and not empty.
    pub(crate) fn variable(&self, name: &str) -> Option<&OsStr> {
        let value = self.variables.get(OsStr::new(name))?;
        (!value.is_empty()).then_some(value)
    }

    /// The absolute paths in a variable that lists paths.
    fn paths(&self, name: &str) -> Vec<PathBuf> {
        let value = self.variable(name).unwrap_or_default();
        env::split_paths(value)
            .filter(|path| path.is_absolute())
            .collect()
    }

    /// Maps an absolute path into this machine's root folder.
    fn system(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The folders of the CUDA toolkit.
    fn toolkits(&self) -> Vec<PathBuf> {
        let named = ["CUDA_PATH", "CUDA_HOME"]
            .into_iter()
            .filter_map(|name| self.variable(name));
        let usual = ["/usr/local/cuda", "/opt/cuda"].map(|folder| self.system(folder));
        named.map(PathBuf::from).chain(usual).collect()
    }

    /// The folders `nvidia/NAME` of Python wheels, which contain `lib` and `include`.
    pub(crate) fn wheels(&self, names: &[&str]) -> Vec<PathBuf> {
        let mut roots: Vec<PathBuf> = Vec::new();
        // NVIDIA installs its wheels next to each other, so start with those that these variables
        // name.
        let named = self
            .paths("LD_LIBRARY_PATH")
            .into_iter()
            .map(|folder| folder.join(".."));
        for wheel in named.chain(self.variable("CUDA_PATH").map(PathBuf::from)) {
            roots.extend(python::site_packages_beside(&wheel));
        }
        roots.extend(
            python::site_packages(self)
                .iter()
                .map(|folder| folder.join("nvidia")),
        );
        let wheels = roots
            .iter()
            .flat_map(|root| names.iter().map(|name| root.join(name)));
        unique(wheels.filter(|wheel| wheel.is_dir()))
    }

    /// The folders that may contain the library file `library`, the loader's folders first.
    /// `wheels` names the wheels that contain it.
    pub(crate) fn folders(&self, library: &str, wheels: &[&str]) -> Vec<PathBuf> {
        let toolkits = self.toolkits();
        let conda = self
            .variable("CONDA_PREFIX")
            .map(|prefix| Path::new(prefix).join("lib"));
        let folders = loader::folders(self, library)
            .into_iter()
            .chain(
                toolkits
                    .iter()
                    .flat_map(|toolkit| ["lib64", "lib"].map(|lib| toolkit.join(lib))),
            )
            .chain(conda)
            .chain(
                self.wheels(wheels)
                    .into_iter()
                    .map(|wheel| wheel.join("lib")),
            );
        unique(folders.filter(|folder| folder.is_dir()))
    }

    /// The files named `library` in this folder of the CUDA toolkits.
    pub(crate) fn files_in_toolkits(&self, folder: &str, library: &str) -> Vec<PathBuf> {
        let toolkits = self.toolkits().into_iter();
        let files = toolkits.map(|toolkit| toolkit.join(folder).join(library));
        unique(files.filter(|file| file.is_file()))
    }

    /// The files named `library` in [`Self::folders`]. A file that several links lead to is listed
    /// once.
    pub(crate) fn files(&self, library: &str, wheels: &[&str]) -> Vec<PathBuf> {
        let files = self
            .folders(library, wheels)
            .into_iter()
            .map(|folder| folder.join(library));
        unique(files.filter(|file| file.is_file()))
    }
}

/// Keeps the first of several paths that lead to the same file.
fn unique(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut seen = Vec::new();
    let is_new = |path: &PathBuf| {
        let place = path.canonicalize().unwrap_or_else(|_| path.clone());
        let is_new = !seen.contains(&place);
        seen.push(place);
        is_new
    };
    paths.filter(is_new).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    fn put(file: &Path) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }

    #[test]
    fn every_place_is_looked_at_once_and_the_loaders_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let places = [
            "apt/libcudnn.so.9",
            "usr/local/cuda/lib64/libcudnn.so.9",
            "conda/lib/libcudnn.so.9",
            "listed/nvidia/cudnn/lib/libcudnn.so.9",
            "venv/lib/python3.12/site-packages/nvidia/cudnn/lib/libcudnn.so.9",
            "home/.local/lib/python3.11/site-packages/nvidia/cudnn/lib/libcudnn.so.9",
            "usr/lib/python3/dist-packages/nvidia/cudnn/lib/libcudnn.so.9",
        ]
        .map(|place| root.join(place));
        places.iter().for_each(|place| put(place));
        // A second path to the same file.
        symlink(root.join("apt"), root.join("other")).unwrap();
        let path = |name: &str| root.join(name).display().to_string();
        let libraries = format!("{}:{}::relative", path("apt"), path("other"));
        let machine = Machine::described(
            root,
            &[
                ("LD_LIBRARY_PATH", &libraries),
                ("CONDA_PREFIX", &path("conda")),
                ("PYTHONPATH", &path("listed")),
                ("VIRTUAL_ENV", &path("venv")),
                ("HOME", &path("home")),
            ],
        );
        assert_eq!(machine.files("libcudnn.so.9", &["cudnn"]), places);
        assert!(
            Machine::described(&root.join("empty"), &[])
                .files("libcudnn.so.9", &[])
                .is_empty()
        );
    }

    #[test]
    fn wheels_are_found_beside_wheels_that_variables_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for wheel in [
            "a/nvidia/cublas/lib/x",
            "a/nvidia/nccl/lib/x",
            "b/nvidia/nccl/lib/x",
        ] {
            put(&root.join(wheel));
        }
        let path = |name: &str| root.join(name).display().to_string();
        let machine = Machine::described(
            root,
            &[
                ("LD_LIBRARY_PATH", &path("a/nvidia/cublas/lib")),
                ("CUDA_PATH", &path("b/nvidia/cu13")),
            ],
        );
        let expected = ["a", "b"].map(|site| root.join(site).join("nvidia/nccl"));
        assert_eq!(machine.wheels(&["nccl"]), expected);
    }
}
