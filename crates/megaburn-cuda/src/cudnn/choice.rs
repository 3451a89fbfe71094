//! Chooses the cuDNN to load: the newest on the machine, unless an environment variable names one.

use std::path::{Path, PathBuf};

use crate::{
    error::CudaError,
    search::{Header, Machine, Version},
};

/// The environment variable that names the file or folder of the cuDNN to load. If it is set, no
/// other cuDNN is considered.
pub const VARIABLE: &str = "MEGABURN_CUDNN";

/// In older versions the backward pass is wrong if the number of keys is not a multiple of 128.
pub(super) const OLDEST: Version = Version([9, 15, 1]);
const NAME: &str = "libcudnn.so.9";
const HEADER: Header = Header {
    name: "cudnn_version.h",
    numbers: ["CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"],
};
const INSTALL: &str = "install cuDNN 9.15.1 or newer (package libcudnn9-cuda-13, or the wheel \
                      nvidia-cudnn-cu13), or set MEGABURN_CUDNN to its folder";

/// A cuDNN on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CandidateLibrary {
    pub(super) file: PathBuf,
    /// The version that its file name or header gives; cuDNN itself is queried only after loading.
    pub(super) version: Option<Version>,
}

impl CandidateLibrary {
    fn at(file: PathBuf) -> Self {
        let version = Version::of(&file, HEADER);
        Self { file, version }
    }

    fn is_unsupported_version(&self) -> bool {
        self.version.is_some_and(|version| version < OLDEST)
    }

    /// The version and the file, for people.
    pub(super) fn describe(&self) -> String {
        let version = self
            .version
            .map_or("(unknown version)".into(), |found| found.to_string());
        format!("{version} ({})", self.file.display())
    }
}

/// All cuDNNs of a machine, and the candidates to load, best first.
#[derive(Clone, Debug)]
pub(super) struct LibraryChoice {
    /// All libraries that were found, in search order.
    pub(super) seen: Vec<CandidateLibrary>,
    /// The candidates. If one cannot be loaded, the next is tried.
    pub(super) best: Vec<CandidateLibrary>,
}

impl LibraryChoice {
    /// Searches the machine. `loaded` is the folder of a cuDNN that this process has already
    /// loaded: it must be used, because two versions must not be mixed.
    ///
    /// # Errors
    /// No library was found, all of them are too old, or the environment variable names no library.
    pub(super) fn on(machine: &Machine, loaded: Option<&Path>) -> Result<Self, CudaError> {
        let seen: Vec<CandidateLibrary> = machine
            .files(NAME, &["cudnn"])
            .into_iter()
            .map(CandidateLibrary::at)
            .collect();
        let named = machine
            .variable(VARIABLE)
            .map(|path| named(Path::new(path)))
            .transpose()?;
        if let Some(folder) = loaded {
            let file = folder.join(NAME);
            return match named {
                Some(named) if folder_of(&named.file) != folder => {
                    Err(CudaError::Refused(format!(
                        "{VARIABLE} names the cuDNN in {}, but this process has already loaded \
                        the one in {}: unset the variable",
                        folder_of(&named.file).display(),
                        folder.display()
                    )))
                }
                _ => Ok(Self {
                    seen,
                    best: vec![CandidateLibrary::at(file)],
                }),
            };
        }
        if let Some(named) = named {
            return Ok(Self {
                seen,
                best: vec![named],
            });
        }
        if seen.is_empty() {
            let folders = machine.folders(NAME, &["cudnn"]);
            return Err(CudaError::MissingLibrary {
                library: "cuDNN",
                names: vec![NAME.into()],
                folders: folders
                    .iter()
                    .map(|folder| folder.display().to_string())
                    .collect(),
                install: INSTALL,
            });
        }
        let mut best: Vec<CandidateLibrary> = seen
            .iter()
            .filter(|seen| !seen.is_unsupported_version())
            .cloned()
            .collect();
        // The sort is stable, so search order breaks ties; unknown versions come last.
        best.sort_by_key(|seen| std::cmp::Reverse(seen.version));
        if best.is_empty() {
            let newest = seen
                .iter()
                .max_by_key(|seen| seen.version)
                .unwrap_or(&seen[0]);
            return Err(too_old(newest, &seen));
        }
        Ok(Self { seen, best })
    }

    /// Refuses a loaded library that reports a version that is too old.
    pub(super) fn check(&self, loaded: &CandidateLibrary) -> Result<(), CudaError> {
        if loaded.is_unsupported_version() {
            Err(too_old(loaded, &self.seen))
        } else {
            Ok(())
        }
    }
}

/// The cuDNN at a path, which may be a file or a folder.
fn named(path: &Path) -> Result<CandidateLibrary, CudaError> {
    let file = if path.is_dir() {
        path.join(NAME)
    } else {
        path.to_path_buf()
    };
    if file.is_file() {
        return Ok(CandidateLibrary::at(file));
    }
    Err(CudaError::Refused(format!(
        "{VARIABLE} is {:?}, which has no {NAME}; set it to the library's file or folder",
        path.display().to_string()
    )))
}

/// The folder of a library's file, with all links resolved. cuDNN's parts are in the same folder.
pub(super) fn folder_of(file: &Path) -> PathBuf {
    let file = file.canonicalize().unwrap_or_else(|_| file.to_path_buf());
    file.parent().map(Path::to_path_buf).unwrap_or_default()
}

fn too_old(found: &CandidateLibrary, seen: &[CandidateLibrary]) -> CudaError {
    let place = folder_of(&found.file);
    let others = seen.iter().filter(|other| folder_of(&other.file) != place);
    let newest = others
        .clone()
        .filter(|other| other.version > Some(OLDEST))
        .max_by_key(|x| x.version);
    let advice = match newest {
        Some(newer) => format!(
            "this machine has a newer version, {}: unset {VARIABLE}, or set it to {}",
            newer.describe(),
            folder_of(&newer.file).display()
        ),
        None => INSTALL.into(),
    };
    let others: Vec<String> = others.map(CandidateLibrary::describe).collect();
    let also = if others.is_empty() {
        String::new()
    } else {
        format!(" (also seen: {})", others.join(", "))
    };
    let found = found.describe();
    CudaError::Refused(format!(
        "cuDNN {found} is too old: {OLDEST} or newer is required{also}; {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A site-packages folder with a cuDNN wheel of this version; `None` leaves out the header, so
    /// that the version is unknown.
    fn wheel(root: &Path, site: &str, version: Option<[u32; 3]>) -> PathBuf {
        let folder = root.join(site).join("nvidia/cudnn");
        fs::create_dir_all(folder.join("lib")).unwrap();
        fs::create_dir_all(folder.join("include")).unwrap();
        if let Some(version) = version {
            let lines = HEADER.numbers.iter().zip(version);
            let lines: String = lines
                .map(|(name, value)| format!("#define {name} {value}\n"))
                .collect();
            fs::write(folder.join("include").join(HEADER.name), lines).unwrap();
        }
        let file = folder.join("lib").join(NAME);
        fs::write(&file, "").unwrap();
        file
    }

    fn machine(root: &Path, sites: &[&str], named: &str) -> Machine {
        let sites: Vec<String> = sites
            .iter()
            .map(|site| root.join(site).display().to_string())
            .collect();
        Machine::described(root, &[("PYTHONPATH", &sites.join(":")), (VARIABLE, named)])
    }

    fn chosen(machine: &Machine) -> Result<Vec<PathBuf>, String> {
        let choice = LibraryChoice::on(machine, None).map_err(|error| error.to_string())?;
        Ok(choice.best.into_iter().map(|seen| seen.file).collect())
    }

    #[test]
    fn the_newest_that_is_new_enough_is_taken_wherever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        wheel(root, "old", Some([9, 14, 0]));
        let unknown = wheel(root, "unknown", None);
        let [good, best, same] = [("good", 18), ("best", 19), ("same", 19)]
            .map(|(site, minor)| wheel(root, site, Some([9, minor, 0])));
        let machine = machine(root, &["old", "unknown", "good", "best", "same"], "");
        assert_eq!(chosen(&machine), Ok(vec![best, same, good, unknown]));
    }

    #[test]
    fn one_that_is_named_is_taken_and_a_newer_one_is_pointed_at() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let old = wheel(root, "old", Some([9, 14, 0]));
        let new = wheel(root, "new", Some([9, 19, 0]));
        let place = old.parent().unwrap().display().to_string();
        let machine = machine(root, &["old", "new"], &place);
        assert_eq!(chosen(&machine), Ok(vec![old]));
        let choice = LibraryChoice::on(&machine, None).unwrap();
        let error = choice.check(&choice.best[0]).unwrap_err().to_string();
        let new = new.display().to_string();
        for text in [
            "cuDNN 9.14.0",
            "9.15.1 or newer",
            "9.19.0",
            &new,
            "unset MEGABURN_CUDNN",
        ] {
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn old_ones_alone_and_none_are_refused_with_what_to_install() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        wheel(root, "older", Some([9, 1, 0]));
        wheel(root, "old", Some([9, 14, 0]));
        let error = chosen(&machine(root, &["older", "old"], "")).unwrap_err();
        assert!(
            error.contains("cuDNN 9.14.0") && error.contains("also seen: 9.1.0"),
            "{error}"
        );
        assert!(error.contains("install cuDNN 9.15.1"), "{error}");
        let error = chosen(&machine(root, &[], "")).unwrap_err();
        assert!(
            error.contains("libcudnn.so.9") && error.contains("install"),
            "{error}"
        );
        let error = chosen(&machine(root, &["old"], "/nowhere")).unwrap_err();
        assert!(error.contains("MEGABURN_CUDNN is \"/nowhere\""), "{error}");
    }

    #[test]
    fn one_that_is_loaded_already_stays_the_only_one() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let old = folder_of(&wheel(root, "old", Some([9, 16, 0])));
        let new = wheel(root, "new", Some([9, 19, 0]));
        let choice = LibraryChoice::on(&machine(root, &["old", "new"], ""), Some(&old)).unwrap();
        assert_eq!(choice.best.len(), 1);
        assert_eq!(folder_of(&choice.best[0].file), old);
        let named = machine(root, &["old", "new"], new.to_str().unwrap());
        let error = LibraryChoice::on(&named, Some(&old))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("has already loaded") && error.contains("MEGABURN_CUDNN"),
            "{error}"
        );
    }
}
