//! What a path on the command line is: a checkpoint, a run, or a folder of checkpoints.

use std::{
    fs,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{
    Checkpoint, CheckpointError, Latest, checkpoint_step, list_checkpoints, may_pass, newest,
    retried,
};
use megaburn_models::ModelError;
use megaburn_store::is_url;
use megaburn_train::{RunInfo, TrainError};

/// A path that a user gave.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::cli) enum Place {
    /// The folder of one checkpoint.
    Checkpoint(PathBuf),
    /// A folder of checkpoints.
    Folder {
        /// The folder.
        checkpoints: PathBuf,
        /// The folder of the run that it belongs to, if that is known.
        run: Option<PathBuf>,
    },
}

impl Place {
    /// Looks at what the folder `path` holds.
    ///
    /// # Errors
    /// It holds no checkpoint and is not a run's folder; it cannot be read.
    pub(in crate::cli) fn of(path: &Path) -> Result<Self, TrainError> {
        if is_url(path) {
            let why = "is a URL; copy the checkpoint with `megaburn checkpoint fetch` first";
            return Err(refused(path, why));
        }
        if !is_folder(path)? {
            return Err(refused(path, "is not a folder; give a checkpoint or a run"));
        }
        let name = path.file_name().and_then(|name| name.to_str());
        // A committed checkpoint that has lost its manifest is one, too.
        if path.join("manifest.json").is_file() || name.and_then(checkpoint_step).is_some() {
            return Ok(Self::Checkpoint(path.to_path_buf()));
        }
        let checkpoints = path.join("checkpoints");
        if is_folder(&checkpoints)? {
            let run = Some(path.to_path_buf());
            return Ok(Self::Folder { checkpoints, run });
        }
        if name == Some("checkpoints") || !list_checkpoints(path)?.is_empty() {
            let above = path.canonicalize().ok();
            let above = above.and_then(|path| path.parent().map(Path::to_path_buf));
            return Ok(Self::Folder {
                checkpoints: path.to_path_buf(),
                run: above.filter(|run| run.join("run.json").is_file()),
            });
        }
        let why = if path.join("config.json").is_file() {
            "is a Hugging Face model, which `megaburn convert import` makes a checkpoint of"
        } else {
            "contains neither manifest.json (a checkpoint) nor checkpoints/ (a run)"
        };
        Err(refused(path, why))
    }

    /// The run that a folder of checkpoints belongs to, if it is marked.
    ///
    /// # Errors
    /// The run's marker cannot be read.
    pub(super) fn run(&self) -> Result<Option<RunInfo>, TrainError> {
        match self {
            Self::Folder { run: Some(run), .. } => Ok(RunInfo::read(run)?),
            _ => Ok(None),
        }
    }
}

/// Opens the checkpoint at a path, or the newest whole one of a run. Lengths of files are verified,
/// and what is read later is compared with its hashes.
///
/// # Errors
/// It is no checkpoint, or is damaged, or the run has no whole one.
pub(in crate::cli) fn open(path: &Path) -> Result<Checkpoint, TrainError> {
    let folder = match Place::of(path)? {
        Place::Checkpoint(path) => return Ok(retried(|| Checkpoint::open(&path))?),
        Place::Folder { checkpoints, .. } => checkpoints,
    };
    let Latest {
        checkpoint,
        refused: damaged,
    } = newest(&folder)?;
    for damaged in &damaged {
        tracing::warn!(
            "checkpoint {} is refused: {}",
            damaged.path.display(),
            damaged.why
        );
    }
    match (checkpoint, damaged.into_iter().next()) {
        (Some(checkpoint), _) => Ok(checkpoint),
        (None, Some(newest)) => Err(CheckpointError::Damaged {
            file: newest.path,
            why: format!("no checkpoint of the run is whole: {}", newest.why),
        }
        .into()),
        (None, None) => Err(refused(&folder, "contains no checkpoint")),
    }
}

/// Whether a folder is at a path.
fn is_folder(path: &Path) -> Result<bool, TrainError> {
    let look = || match fs::metadata(path) {
        Ok(found) => Ok(found.is_dir()),
        Err(source) if may_pass(&source) => Err(CheckpointError::Io {
            action: "access",
            path: path.to_path_buf(),
            source,
        }),
        Err(_) => Ok(false),
    };
    Ok(retried(look)?)
}

/// The error that a path is not what a command needs.
pub(super) fn refused(path: &Path, why: &str) -> TrainError {
    ModelError::File {
        path: path.to_path_buf(),
        why: why.into(),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_by_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
        let make = |name: &str| fs::create_dir_all(at(name)).unwrap();
        let place = |name: &str| Place::of(&at(name));
        make("run/checkpoints/step-00000003");
        fs::write(at("run/run.json"), "").unwrap();
        make("loose/step-00000004");
        make("best");
        fs::write(at("best/manifest.json"), "").unwrap();
        make("hf");
        fs::write(at("hf/config.json"), "").unwrap();
        make("other/checkpoints");
        fs::write(at("file"), "").unwrap();

        let folder = |checkpoints: &str, run: Option<&str>| Place::Folder {
            checkpoints: at(checkpoints),
            run: run.map(at),
        };
        assert_eq!(
            place("run").unwrap(),
            folder("run/checkpoints", Some("run"))
        );
        assert_eq!(
            place("run/checkpoints").unwrap(),
            folder("run/checkpoints", Some("run"))
        );
        assert_eq!(place("loose").unwrap(), folder("loose", None));
        assert_eq!(
            place("other/checkpoints").unwrap(),
            folder("other/checkpoints", None)
        );
        for name in ["best", "run/checkpoints/step-00000003"] {
            assert_eq!(place(name).unwrap(), Place::Checkpoint(at(name)));
        }
        for (name, why) in [
            ("hf", "is a Hugging Face model"),
            (".", "contains neither manifest.json"),
            ("file", "is not a folder"),
            ("nowhere", "is not a folder"),
        ] {
            let error = place(name).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(error.exit(), megaburn_train::Exit::BadInput);
        }
    }
}
