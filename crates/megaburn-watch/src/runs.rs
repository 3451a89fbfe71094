//! The runs that are watched: folders of runs, and folders in which runs appear.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{error::WatchError, run_files::RunFiles};

/// The most runs that are watched at the same time.
const MOST_RUNS: usize = 200;

/// The runs that a server watches. A run keeps its number as long as the server runs.
pub struct Runs {
    files: Arc<dyn RunFiles>,
    given: Vec<PathBuf>,
    known: Mutex<Vec<PathBuf>>,
}

impl fmt::Debug for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runs")
            .field("given", &self.given)
            .finish_non_exhaustive()
    }
}

/// What was found at a path when the server started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A run whose metrics have lines.
    Run,
    /// A run without metrics so far.
    EmptyRun,
    /// A folder with this number of folders of runs.
    Folder(usize),
    /// An empty folder, or no folder: a run may appear there.
    Nothing,
}

/// A run, as the server reads it.
pub(crate) struct WatchedRun {
    pub(crate) dir: PathBuf,
    /// The last part of the path, or as much of the path as tells it from the other runs.
    pub(crate) name: String,
    pub(crate) files: Arc<dyn RunFiles>,
}

impl Runs {
    /// Watches runs in these folders. Each is the folder of a run, or holds folders of runs, which
    /// are looked for each time; a folder that is empty or absent is one in which a run may appear.
    ///
    /// # Errors
    /// A path is a file, holds other files and no run, or is absent together with its parent.
    pub fn new(given: Vec<PathBuf>, files: Arc<dyn RunFiles>) -> Result<Self, WatchError> {
        if given.is_empty() {
            return Err(WatchError::NoRuns);
        }
        let mut folders: Vec<PathBuf> = Vec::new();
        for path in given {
            check(&path, files.as_ref())?;
            // The same folder under two names is one run.
            let path = fs::canonicalize(&path).unwrap_or(path);
            if !folders.contains(&path) {
                folders.push(path);
            }
        }
        Ok(Self {
            files,
            given: folders,
            known: Mutex::default(),
        })
    }

    /// What there is in each of the folders now.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn found(&self) -> Result<Vec<(PathBuf, Found)>, WatchError> {
        let found = |path: &PathBuf| Ok((path.clone(), check(path, self.files.as_ref())?));
        self.given.iter().map(found).collect()
    }

    /// All runs that there are or were, in the order in which they were found.
    pub(crate) fn all(&self) -> Vec<WatchedRun> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for path in &self.given {
            let found = match self.files.is_run(path) {
                true => vec![path.clone()],
                false => runs_in(path, self.files.as_ref()),
            };
            for dir in found {
                if !known.contains(&dir) && known.len() < MOST_RUNS {
                    known.push(dir);
                }
            }
        }
        let run = |dir: &PathBuf| WatchedRun {
            dir: dir.clone(),
            name: short_name(dir, &known),
            files: self.files.clone(),
        };
        known.iter().map(run).collect()
    }
}

/// Looks at what a path has.
fn check(path: &Path, files: &dyn RunFiles) -> Result<Found, WatchError> {
    let own = || path.to_path_buf();
    if !path.exists() {
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        return match parent.unwrap_or(Path::new(".")).is_dir() {
            true => Ok(Found::Nothing),
            false => Err(WatchError::Absent { path: own() }),
        };
    }
    if !path.is_dir() {
        return Err(WatchError::NotAFolder { path: own() });
    }
    if files.is_run(path) {
        let has_lines = fs::metadata(files.metrics(path)).is_ok_and(|found| found.len() > 0);
        return Ok(if has_lines {
            Found::Run
        } else {
            Found::EmptyRun
        });
    }
    let runs = runs_in(path, files).len();
    if runs > 0 {
        return Ok(Found::Folder(runs));
    }
    let names = names_in(path).map_err(|source| WatchError::Read {
        path: own(),
        source,
    })?;
    match names.is_empty() {
        true => Ok(Found::Nothing),
        false => Err(WatchError::NotARun {
            path: own(),
            names: list(&names),
        }),
    }
}

/// The folders of runs directly in a folder, by name.
fn runs_in(folder: &Path, files: &dyn RunFiles) -> Vec<PathBuf> {
    let names = names_in(folder).unwrap_or_default().into_iter();
    let paths = names.map(|name| folder.join(name));
    paths
        .filter(|path| path.is_dir() && files.is_run(path))
        .collect()
}

/// The names in a folder, sorted.
fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<_> = entries.iter().map(name).collect();
    names.sort();
    Ok(names)
}

/// The first names, and the number of the others.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown: Vec<_> = names
        .iter()
        .take(SHOWN)
        .map(|name| format!("`{name}`"))
        .collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The shortest end of a path that no other path has.
fn short_name(dir: &Path, all: &[PathBuf]) -> String {
    let num_parts = dir.components().count();
    let end = |path: &Path, parts: usize| -> PathBuf {
        let skipped = path.components().count().saturating_sub(parts);
        path.components().skip(skipped).collect()
    };
    let is_unique = |parts: &usize| {
        let own = end(dir, *parts);
        all.iter().filter(|other| end(other, *parts) == own).count() == 1
    };
    let parts = (1..=num_parts).find(is_unique).unwrap_or(num_parts);
    end(dir, parts).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain;

    impl RunFiles for Plain {
        fn metrics(&self, run: &Path) -> PathBuf {
            run.join("m")
        }
        fn state(&self, run: &Path) -> PathBuf {
            run.join("s")
        }
        fn config(&self, run: &Path) -> PathBuf {
            run.join("c")
        }
    }

    fn runs(given: &[PathBuf]) -> Result<Runs, WatchError> {
        Runs::new(given.to_vec(), Arc::new(Plain))
    }

    fn add_run(dir: &Path, text: &str) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("m"), text).unwrap();
    }

    #[test]
    fn runs_that_appear_later_are_found_and_keep_their_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        add_run(&root.join("x/b"), "1");
        let given = [root.join("x"), root.join("later"), root.join("x/b")];
        let runs = runs(&given).unwrap();
        let found: Vec<_> = runs
            .found()
            .unwrap()
            .into_iter()
            .map(|found| found.1)
            .collect();
        assert_eq!(found, [Found::Folder(1), Found::Nothing, Found::Run]);
        let names = || {
            runs.all()
                .into_iter()
                .map(|run| run.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(), ["b"]);
        add_run(&root.join("x/a"), "");
        add_run(&root.join("later"), "");
        assert_eq!(names(), ["b", "a", "later"]);
        assert_eq!(runs.found().unwrap()[1].1, Found::EmptyRun);
        // A run that is removed keeps its place, and runs of one name get longer names.
        fs::remove_dir_all(root.join("x/a")).unwrap();
        fs::remove_dir_all(root.join("later")).unwrap();
        add_run(&root.join("later/b"), "");
        assert_eq!(names(), ["x/b", "a", "later", "later/b"]);
    }

    #[test]
    fn what_is_no_run_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("other")).unwrap();
        fs::write(at("other/thesis"), "").unwrap();
        let cases = [
            (
                at("other"),
                "neither the folder of a run nor",
                "contains `thesis`",
            ),
            (at("other/thesis"), "is a file", "run.dir"),
            (at("no/such"), "does not exist", "run.dir"),
        ];
        for (path, what, fix) in cases {
            let error = runs(std::slice::from_ref(&path)).unwrap_err().to_string();
            let named = format!("`{}`", path.display());
            assert!(
                error.contains(&named) && error.contains(what) && error.contains(fix),
                "{error}"
            );
        }
        assert!(matches!(runs(&[]), Err(WatchError::NoRuns)));
    }
}
