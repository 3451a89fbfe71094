//! Whether a folder may be a run's. Nothing is written here.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{may_pass, retried_where};

use super::{
    RunFolderError,
    lock::is_lock,
    marker::{Marker, is_absent},
    names::{CHECKPOINTS, CONFIG, LOCK, MARKER, is_checkpoint, is_owned, leftover_of},
};

/// What a folder is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It is absent or empty, or holds what a start left behind that was killed at once.
    Empty,
    /// A run's.
    Run(Marker),
    /// A run's that a version without markers made, or one into which somebody put checkpoints.
    Unmarked,
    /// Other files, which are to stay.
    Others,
}

/// Looks at the folder `dir`.
///
/// # Errors
/// It holds other files and `allow_other_files` is not set; it holds a file of a name that a run would
/// write; it is no folder or cannot be read.
pub(super) fn inspect(dir: &Path, allow_other_files: bool) -> Result<Found, RunFolderError> {
    let fail = |source| RunFolderError::Unusable { path: dir.to_path_buf(), source };
    let names = match retried_where(may_pass, || names_in(dir)) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Empty),
        Err(error) => return Err(fail(error)),
    };
    if let Some(marker) = Marker::read(dir)? {
        return Ok(Found::Run(marker));
    }
    let has = |name: &str| names.iter().any(|found| found == name);
    let has_lock = has(LOCK) && is_lock(dir);
    if has_lock && dir.join(CHECKPOINTS).is_dir() {
        return Ok(Found::Unmarked);
    }
    let is_left_by_start =
        |name: &String| (name == LOCK && has_lock) || leftover_of(name) == Some(MARKER);
    if names.iter().all(is_left_by_start) {
        return Ok(Found::Empty);
    }
    let only_checkpoints = |name: &String| name == CHECKPOINTS || is_left_by_start(name);
    if names.iter().all(only_checkpoints) && holds_only_checkpoints(&dir.join(CHECKPOINTS)) {
        return Ok(Found::Unmarked);
    }
    if !allow_other_files {
        let others: Vec<_> = names.into_iter().filter(|name| !is_left_by_start(name)).collect();
        return Err(RunFolderError::NotARun { path: dir.to_path_buf(), names: list(&others) });
    }
    // The user's `config.toml` stays, and the resolved one gets another name.
    let is_taken = |name: &&String| is_owned(name) && *name != CONFIG && !is_left_by_start(name);
    match names.iter().find(is_taken) {
        Some(name) => Err(RunFolderError::Taken { path: dir.join(name) }),
        None => Ok(Found::Others),
    }
}

/// Whether a folder holds checkpoints, such as `convert import` writes, and nothing else.
fn holds_only_checkpoints(dir: &Path) -> bool {
    let is_checkpoint =
        |name: &String| is_checkpoint(name) && dir.join(name).join("manifest.json").is_file();
    names_in(dir).is_ok_and(|names| !names.is_empty() && names.iter().all(is_checkpoint))
}

/// The names in a folder, in order.
pub(super) fn names_in(dir: &Path) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| {
        entry.map(|entry| entry.file_name().to_string_lossy().into_owned())
    };
    let mut names = fs::read_dir(dir)?.map(name).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// The first names, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The part of `run` that `path` is, if it is one: the run itself, or what the run owns.
pub(super) fn part_of(run: &Path, path: &Path) -> Option<PathBuf> {
    let (run, path) = (fs::canonicalize(run).ok()?, fs::canonicalize(path).ok()?);
    let inside = path.strip_prefix(&run).ok()?;
    let first = inside.components().next().map(|first| first.as_os_str().to_string_lossy());
    let is_part = first.is_none_or(|name| is_owned(&name) || super::aside::is_aside(&name));
    is_part.then(|| inside.to_path_buf())
}

/// Whether something is at a path, a broken link too.
pub(super) fn is_there(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match name.ends_with('/') {
                true => fs::create_dir_all(path).unwrap(),
                false => fs::write(path, "").unwrap(),
            }
        }
        dir
    }

    const IMPORTED: &str = "checkpoints/step-00000000/manifest.json";

    #[rstest]
    #[case::empty(&[], Found::Empty)]
    #[case::killed(&[".lock", "run.json.tmp-1-2"], Found::Empty)]
    #[case::older(&[".lock", "checkpoints/", "config.toml", "notes"], Found::Unmarked)]
    #[case::imported(&[IMPORTED], Found::Unmarked)]
    fn a_folder_that_a_run_may_have(#[case] names: &[&str], #[case] expected: Found) {
        let dir = folder(names);
        assert_eq!(inspect(dir.path(), false).unwrap(), expected);
        assert_eq!(inspect(&dir.path().join("absent"), false).unwrap(), Found::Empty);
    }

    #[rstest]
    #[case(&["hf/thesis"], "it holds `hf`")]
    #[case(&["a", "b", "c", "d", "e"], "it holds `a`, `b`, `c` and 2 more")]
    #[case(&["config.toml"], "it holds `config.toml`")]
    #[case(&["checkpoints/"], "it holds `checkpoints`")]
    #[case(&["checkpoints/mine/weights.pt"], "it holds `checkpoints`")]
    #[case(&[IMPORTED, "checkpoints/notes"], "it holds `checkpoints`")]
    fn a_folder_of_other_files_is_refused(#[case] names: &[&str], #[case] what: &str) {
        let dir = folder(names);
        let error = inspect(dir.path(), false).unwrap_err().to_string();
        assert!(error.contains("is not empty and is not a run's folder"), "{error}");
        assert!(error.contains(what) && error.contains("run.allow_other_files=true"), "{error}");
    }

    #[rstest]
    #[case(&["notes", "config.toml"], None)]
    #[case(&["notes", "hf/thesis"], Some("hf"))]
    #[case(&["metrics.jsonl"], Some("metrics.jsonl"))]
    #[case(&["checkpoints/mine/weights.pt"], Some("checkpoints"))]
    fn other_files_may_be_allowed_but_not_under_names_of_a_run(
        #[case] names: &[&str],
        #[case] taken: Option<&str>,
    ) {
        let dir = folder(names);
        match (inspect(dir.path(), true), taken) {
            (found, None) => assert_eq!(found.unwrap(), Found::Others),
            (found, Some(name)) => {
                let error = found.unwrap_err().to_string();
                let path = dir.path().join(name).display().to_string();
                assert!(error.starts_with(&format!("`{path}` was not written by")), "{error}");
            }
        }
        assert_eq!(names_in(dir.path()).unwrap().len(), names.len(), "nothing was written");
    }

    #[test]
    fn the_parts_of_a_run_are_known_and_other_files_are_none() {
        let dir = folder(&[IMPORTED, "hf/config.json", "mine/config.json"]);
        let part = |name: &str| part_of(dir.path(), &dir.path().join(name)).is_some();
        assert!(part("") && part("hf") && part("checkpoints/step-00000000"));
        assert!(!part("mine") && !part("absent") && !part(".."));
    }
}
