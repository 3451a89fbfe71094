//! Checks whether a folder may be used by a run. Nothing is written here.

use std::{fs, io, path::Path};

use megaburn_checkpoint::{checkpoint_step, may_pass, retried_where};
use megaburn_report::metrics::{MetricsRecord, read_metrics};

use super::{
    RunFolderError,
    lock::is_lock,
    marker::Marker,
    names::{CHECKPOINTS, LOCK, MARKER, METRICS, names_in},
    owned::{Owned, half_written, is_owned},
};

/// The contents of a folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FolderContent {
    /// The folder is absent or empty, or has only leftovers of a start that was killed early.
    Empty,
    /// The folder of a run.
    Run(Marker),
    /// The folder of a run from a version without markers, or one into which checkpoints were put.
    Unmarked(Trace),
    /// Other files, which must be kept.
    Others,
}

/// The evidence that a folder without a marker belongs to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trace {
    /// The metrics of a run, and the other files that a version without markers wrote.
    Metrics,
    /// Only checkpoints, such as `convert import` writes.
    Checkpoints,
}

impl Trace {
    fn find(dir: &Path) -> Option<Self> {
        if holds_metrics(dir) {
            return Some(Self::Metrics);
        }
        holds_checkpoint(&dir.join(CHECKPOINTS)).then_some(Self::Checkpoints)
    }

    /// Whether this evidence accounts for a file of a run.
    fn explains(self, owned: &Owned) -> bool {
        match self {
            Self::Metrics => owned.is_old,
            Self::Checkpoints => owned.name == CHECKPOINTS,
        }
    }
}

/// Inspects the folder `dir`.
///
/// # Errors
/// The folder holds other files and `allow_other_files` is not set; a file has a name that a run
/// would write to; the path is not a folder or cannot be read.
pub(super) fn inspect(
    dir: &Path,
    allow_other_files: bool,
) -> Result<FolderContent, RunFolderError> {
    let fail = |source| RunFolderError::Unusable {
        path: dir.to_path_buf(),
        source,
    };
    let names = match retried_where(may_pass, || names_in(dir)) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FolderContent::Empty),
        Err(error) => return Err(fail(error)),
    };
    if let Some(marker) = Marker::read(dir)? {
        return Ok(FolderContent::Run(marker));
    }
    let is_left_by_start =
        |name: &String| (name == LOCK && is_lock(dir)) || half_written(name) == Some(MARKER);
    if names.iter().all(is_left_by_start) {
        return Ok(FolderContent::Empty);
    }
    let trace = Trace::find(dir);
    if trace.is_none() && !allow_other_files {
        let others: Vec<_> = names
            .into_iter()
            .filter(|name| !is_left_by_start(name))
            .collect();
        return Err(RunFolderError::NotARun {
            path: dir.to_path_buf(),
            names: list(&others),
        });
    }
    let is_taken = |name: &&String| {
        let owned = Owned::of(name).filter(|owned| !owned.may_be_taken());
        let is_explained = |owned| trace.is_some_and(|trace| trace.explains(owned));
        owned.is_some_and(|owned| !is_explained(owned)) && !is_left_by_start(name)
    };
    match (names.iter().find(is_taken), trace) {
        (Some(name), _) => Err(RunFolderError::Taken {
            path: dir.join(name),
        }),
        (None, Some(trace)) => Ok(FolderContent::Unmarked(trace)),
        (None, None) => Ok(FolderContent::Others),
    }
}

/// Whether a folder holds a checkpoint, such as `convert import` writes.
fn holds_checkpoint(dir: &Path) -> bool {
    let is_checkpoint = |name: &String| {
        checkpoint_step(name).is_some() && dir.join(name).join("manifest.json").is_file()
    };
    names_in(dir).is_ok_and(|names| names.iter().any(is_checkpoint))
}

/// Whether a folder holds the metrics of a run: at least one complete step.
fn holds_metrics(dir: &Path) -> bool {
    let is_step = |record: &MetricsRecord| matches!(record, MetricsRecord::Step(_));
    read_metrics(dir.join(METRICS)).is_ok_and(|records| records.iter().any(is_step))
}

/// The first names, and the number of the others.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = names.iter().take(SHOWN).map(|name| format!("`{name}`"));
    let shown = shown.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Whether `path` is the run in the folder `run`, or a part of it. The checkpoints may be behind a
/// link.
pub(super) fn is_part_of(run: &Path, path: &Path) -> bool {
    let [Ok(run), Ok(path)] = [run, path].map(fs::canonicalize) else {
        return false;
    };
    if fs::canonicalize(run.join(CHECKPOINTS)).is_ok_and(|steps| path.starts_with(steps)) {
        return true;
    }
    let Ok(inside) = path.strip_prefix(&run) else {
        return false;
    };
    let set_aside = Marker::read(&run)
        .ok()
        .flatten()
        .map_or(Vec::new(), |marker| marker.set_aside);
    let first = inside
        .components()
        .next()
        .map(|first| first.as_os_str().to_string_lossy());
    first.is_none_or(|name| is_owned(&name) || set_aside.iter().any(|aside| *aside == name))
}

#[cfg(test)]
mod tests {
    use megaburn_report::metrics::StepMetrics;
    use rstest::rstest;

    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if name.ends_with('/') {
                fs::create_dir_all(path).unwrap()
            } else {
                fs::write(path, "").unwrap()
            }
        }
        dir
    }

    const IMPORTED: &str = "checkpoints/step-00000000/manifest.json";

    /// A folder that also holds the metrics of a run.
    fn with_metrics(names: &[&str]) -> tempfile::TempDir {
        let dir = folder(names);
        let step = StepMetrics {
            step: 1,
            loss: 2.0,
            ..StepMetrics::default()
        };
        let step = serde_json::to_string(&step).unwrap();
        fs::write(dir.path().join(METRICS), step + "\n").unwrap();
        dir
    }

    #[rstest]
    #[case::empty(&[], FolderContent::Empty)]
    #[case::killed(&[".lock", "run.json.tmp-1-2"], FolderContent::Empty)]
    #[case::imported(&[IMPORTED], FolderContent::Unmarked(Trace::Checkpoints))]
    #[case::beside(&[IMPORTED, "checkpoints/mine/x", "config.toml"], FolderContent::Unmarked(Trace::Checkpoints))]
    fn a_folder_that_a_run_may_have(#[case] names: &[&str], #[case] expected: FolderContent) {
        let dir = folder(names);
        assert_eq!(inspect(dir.path(), false).unwrap(), expected);
        assert_eq!(
            inspect(&dir.path().join("absent"), false).unwrap(),
            FolderContent::Empty
        );
    }

    #[rstest]
    #[case::whole(&[".lock", "checkpoints/", "config.toml", "hf/", "loss.svg", "notes"])]
    #[case::copied_without_dot_files(&["checkpoints/", "config.toml"])]
    fn a_run_of_a_version_without_markers_is_known_by_its_metrics(#[case] names: &[&str]) {
        let found = inspect(with_metrics(names).path(), false).unwrap();
        assert_eq!(found, FolderContent::Unmarked(Trace::Metrics));
    }

    #[rstest]
    #[case(with_metrics(&[".lock", IMPORTED, "state.json"]), "state.json")]
    #[case(with_metrics(&[IMPORTED, "metrics.other-lines.txt"]), "metrics.other-lines.txt")]
    #[case(folder(&[IMPORTED, "loss.svg"]), "loss.svg")]
    #[case(folder(&[IMPORTED, "hf/tokenizer.json"]), "hf")]
    fn what_such_a_run_did_not_write_is_refused(
        #[case] dir: tempfile::TempDir,
        #[case] taken: &str,
    ) {
        for allowed in [false, true] {
            let error = inspect(dir.path(), allowed).unwrap_err().to_string();
            let path = dir.path().join(taken).display().to_string();
            assert!(
                error.starts_with(&format!("`{path}` was not written by")),
                "{error}"
            );
        }
    }

    #[rstest]
    #[case(&["hf/thesis"], "it contains `hf`")]
    #[case(&["a", "b", "c", "d", "e"], "it contains `a`, `b`, `c` and 2 more")]
    #[case(&["config.toml"], "it contains `config.toml`")]
    #[case(&["checkpoints/"], "it contains `checkpoints`")]
    #[case(&["checkpoints/mine/weights.pt"], "it contains `checkpoints`")]
    #[case(&[".lock", "checkpoints/", "config.toml"], "it contains `checkpoints`, `config.toml`")]
    fn a_folder_of_other_files_is_refused(#[case] names: &[&str], #[case] what: &str) {
        let dir = folder(names);
        let error = inspect(dir.path(), false).unwrap_err().to_string();
        assert!(
            error.contains("is not empty and is not a run's folder"),
            "{error}"
        );
        assert!(
            error.contains(what) && error.contains("run.allow_other_files=true"),
            "{error}"
        );
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
            (found, None) => assert_eq!(found.unwrap(), FolderContent::Others),
            (found, Some(name)) => {
                let error = found.unwrap_err().to_string();
                let path = dir.path().join(name).display().to_string();
                assert!(
                    error.starts_with(&format!("`{path}` was not written by")),
                    "{error}"
                );
            }
        }
        assert_eq!(
            names_in(dir.path()).unwrap().len(),
            names.len(),
            "nothing was written"
        );
    }

    #[test]
    fn the_parts_of_a_run_are_known_and_other_files_are_none() {
        let dir = folder(&[
            IMPORTED,
            "hf/config.json",
            "mine/config.json",
            "before-2024/x",
        ]);
        fs::create_dir(dir.path().join("before-2026")).unwrap();
        let marker = Marker::new()
            .unwrap()
            .with_set_aside(vec!["before-2026".into()]);
        marker.write(dir.path()).unwrap();
        let part = |name: &str| is_part_of(dir.path(), &dir.path().join(name));
        assert!(part("") && part("hf") && part("checkpoints/step-00000000") && part("before-2026"));
        assert!(!part("mine") && !part("before-2024") && !part("absent") && !part(".."));
        // The run behind a link.
        let disk = tempfile::tempdir().unwrap();
        let steps = disk.path().join("steps");
        fs::rename(dir.path().join(CHECKPOINTS), &steps).unwrap();
        std::os::unix::fs::symlink(&steps, dir.path().join(CHECKPOINTS)).unwrap();
        assert!(part("checkpoints/step-00000000") && is_part_of(dir.path(), &steps));
    }
}
