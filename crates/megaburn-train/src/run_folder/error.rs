use std::{
    io::{self, ErrorKind},
    path::PathBuf,
};

use thiserror::Error;

use super::names::MARKER;
use crate::exit::Exit;

/// Why a folder cannot be a run's folder, or no longer belongs to the run.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum RunFolderError {
    #[error(
        "run.dir `{}` is not empty and is not a run's folder (it contains {names}): choose \
        another folder with --set run.dir=..., or keep these files next to the run with --set \
        run.allow_other_files=true",
        path.display()
    )]
    NotARun { path: PathBuf, names: String },
    #[error(
        "`{}` is a checkpoint of an earlier run, and --fresh starts another one: move it away, or \
        choose another train.local_checkpoint_dir",
        path.display()
    )]
    LocalCheckpoints { path: PathBuf },
    #[error(
        "`{}` was not written by megaburn, but a run would overwrite it: move it away, or choose \
        another folder with --set run.dir=...",
        path.display()
    )]
    Taken { path: PathBuf },
    #[error("cannot read `{}` as a run's marker: {why}; choose another folder with --set \
            run.dir=...", path.display())]
    Marker { path: PathBuf, why: String },
    #[error("host {host} cannot read `{}`: {why}; restore access and start again", path.display())]
    Unreadable {
        host: String,
        path: PathBuf,
        why: String,
    },
    #[error(
        "`{}` is in use by a run ({holder}); choose another folder with --set run.dir=..., or \
        start again when that run has ended",
        path.display()
    )]
    InUse {
        path: PathBuf,
        holder: String,
        is_elsewhere: bool,
    },
    #[error(
        "`{}` is in use by a run ({holder}), which deletes its old checkpoints itself \
        (train.keep_checkpoints); try again when it has ended",
        path.display()
    )]
    Running { path: PathBuf, holder: String },
    #[error(
        "`{}` cannot be locked ({source}), so a run might start there meanwhile; do this on a file \
        system with locks",
        path.display()
    )]
    NotLocked { path: PathBuf, source: io::Error },
    #[error(
        "`{}` has no {MARKER}, so its checkpoints cannot be assigned to a run; give the folder of a \
        run (`run.dir`)",
        path.display()
    )]
    Unmarked { path: PathBuf },
    #[error("`{}` cannot be the run's folder: {source}", path.display())]
    Unusable { path: PathBuf, source: io::Error },
    #[error(
        "model.init `{init}` is part of the run `{}`, which --fresh would discard: copy it elsewhere first, or choose another folder with --set run.dir=...",
        path.display()
    )]
    FreshInit { init: String, path: PathBuf },
    #[error(
        "rank {rank} on host {host} does not see rank 0's folder: its `{}` {why}; run.dir must be one folder that all hosts share, best an absolute path",
        path.display()
    )]
    NotShared {
        rank: usize,
        host: String,
        path: PathBuf,
        why: String,
    },
    #[error(
        "the run stops, because it no longer owns its folder `{}`: {why}; nothing more was \
        written there",
        path.display()
    )]
    Lost { path: PathBuf, why: String },
}

impl RunFolderError {
    /// The exit code of a process that fails with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Lost { .. } | Self::Unreadable { .. } => Exit::Failed,
            // A run on another host ends without any change here, so this is not bad input.
            Self::InUse {
                is_elsewhere: true, ..
            } => Exit::Failed,
            Self::Unusable { source, .. } if !is_about_path(source.kind()) => Exit::Failed,
            _ => Exit::BadInput,
        }
    }
}

/// Whether an error is caused by the given path, and not by the system.
fn is_about_path(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory
            | ErrorKind::AlreadyExists
            | ErrorKind::PermissionDenied
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::InvalidInput
            | ErrorKind::InvalidFilename
    )
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    // EIO, ENOSPC, EACCES, EROFS.
    #[rstest]
    #[case(5, Exit::Failed)]
    #[case(28, Exit::Failed)]
    #[case(13, Exit::BadInput)]
    #[case(30, Exit::BadInput)]
    fn what_the_system_failed_at_is_not_bad_input(#[case] code: i32, #[case] exit: Exit) {
        let source = io::Error::from_raw_os_error(code);
        assert_eq!(
            RunFolderError::Unusable {
                path: "run".into(),
                source
            }
            .exit(),
            exit
        );
    }
}
