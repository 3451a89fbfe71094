use std::path::{Path, PathBuf};

use megaburn_collective::{Group, objects};

use crate::{
    Checkpoint, CheckpointError,
    agree::{first_failure, settle},
    folder::committed,
};

/// What [`find_latest`] found.
#[derive(Debug)]
pub struct Latest {
    /// The newest checkpoint that is whole; none to start from the beginning.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that are not, newest first.
    pub refused: Vec<Refused>,
}

/// A checkpoint that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its folder.
    pub path: PathBuf,
    /// The error, with the file.
    pub why: String,
}

/// The newest checkpoint in `dir`, whose files are there in full length; what is in them is not
/// verified. None if there is none.
///
/// # Errors
/// The folder cannot be read, or its newest checkpoint is damaged.
pub fn newest(dir: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
    committed(dir)?.first().map(|(_, path)| Checkpoint::open(path)).transpose()
}

/// The newest checkpoint in `dir` of which every byte is as it was written. Those that are not are
/// refused, which is said by `tracing::warn!` on rank 0.
///
/// # Errors
/// The folder cannot be read, or its newest checkpoint was written by a newer version. A folder that
/// is not there holds no checkpoint.
/// # Collective
/// All ranks of `world`; each file is verified by one of them, and all get the same answer.
pub fn find_latest(dir: &Path, world: &Group) -> Result<Latest, CheckpointError> {
    let list = if world.rank() == 0 { committed(dir) } else { Ok(Vec::new()) };
    let list = settle(world, list)?;
    let names = list.iter().filter_map(|(_, path)| path.file_name());
    let names: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    let names: Vec<String> = objects::broadcast(world, &names)?;

    let mut refused = Vec::new();
    for name in names {
        let path = dir.join(name);
        let mine = Checkpoint::open(&path).and_then(|checkpoint| {
            let share = (world.rank()..checkpoint.num_files()).step_by(world.size());
            share.into_iter().try_for_each(|file| checkpoint.verify_file(file))?;
            Ok(checkpoint)
        });
        match (first_failure(world, mine.as_ref().err())?, mine) {
            (None, Ok(checkpoint)) => return Ok(Latest { checkpoint: Some(checkpoint), refused }),
            // A newer version wrote it: falling back would bury it under older steps.
            (_, Err(error @ CheckpointError::UnknownVersion { .. })) => return Err(error),
            (failure, _) => {
                let why = failure.map(|failure| failure.message).unwrap_or_default();
                if world.rank() == 0 {
                    tracing::warn!("checkpoint {} is refused: {why}", path.display());
                }
                refused.push(Refused { path, why });
            }
        }
    }
    Ok(Latest { checkpoint: None, refused })
}
