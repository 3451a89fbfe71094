//! Selects the checkpoint of a folder to use: the newest that is intact.

use std::path::{Path, PathBuf};

use megaburn_collective::{Group, Phase, Progress, host_name, objects};
use serde::{Deserialize, Serialize};

use crate::{
    agree::settle,
    checkpoint::Checkpoint,
    error::CheckpointError,
    fault::{Fault, retried},
    folder::committed,
    verified::remember,
};

/// The checkpoint of a folder to use.
#[derive(Debug)]
pub struct Latest {
    /// The newest intact checkpoint; `None` means to start from scratch.
    pub checkpoint: Option<Checkpoint>,
    /// Newer checkpoints that are not intact, newest first.
    pub refused: Vec<Refused>,
}

/// A checkpoint that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The folder of the checkpoint.
    pub path: PathBuf,
    /// The error, which names the file.
    pub why: String,
}

/// The newest checkpoint in `dir` whose manifest is intact and whose files exist in full length.
/// File contents are not verified, and refused checkpoints are not logged.
///
/// # Errors
/// The folder or a checkpoint in it cannot be read although it may be intact; or another version
/// wrote the newest one. A folder that does not exist holds no checkpoints.
pub fn newest(dir: &Path) -> Result<Latest, CheckpointError> {
    choose(
        list(dir)?,
        |path| judge_alone(retried(|| Checkpoint::open(path))),
        |_| (),
    )
}

/// The newest checkpoint in `dir` whose files all match their hashes. Others are refused with a
/// `tracing::warn!`.
///
/// # Errors
/// As [`newest`].
pub fn newest_valid(dir: &Path) -> Result<Latest, CheckpointError> {
    let whole = |path: &Path| {
        judge_alone(retried(|| {
            let checkpoint = Checkpoint::open(path)?;
            checkpoint.verify()?;
            Ok(checkpoint)
        }))
    };
    let latest = choose(list(dir)?, whole, warn)?;
    latest.warn_of_use();
    Ok(latest)
}

/// Like [`newest_valid`], for all ranks of a run that see the same folder.
///
/// # Collective
/// All ranks of `world`.
pub(crate) fn find_in_folder(dir: &Path, world: &Group) -> Result<Latest, CheckpointError> {
    let phase = world.phase(Phase::Load);
    let paths = if world.rank() == 0 {
        list(dir)
    } else {
        Ok(Vec::new())
    };
    let paths = settle(world, paths)?;
    let names = paths.iter().filter_map(|path| path.file_name());
    let names: Vec<_> = names
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    let names: Vec<String> = objects::broadcast(world, &names)?;
    let paths = names.into_iter().map(|name| dir.join(name)).collect();
    let is_whole = |path: &Path| verify_together(world, path, phase.progress());
    let is_first = world.rank() == 0;
    let latest = choose(paths, is_whole, |refused| {
        if is_first {
            warn(refused);
        }
    })?;
    if is_first {
        latest.warn_of_use();
    }
    Ok(latest)
}

impl Latest {
    /// Logs which checkpoint is used in place of refused ones.
    pub(crate) fn warn_of_use(&self) {
        if let (Some(used), false) = (&self.checkpoint, self.refused.is_empty()) {
            tracing::warn!("using checkpoint {} instead", used.path().display());
        }
    }
}

/// Verifies a checkpoint, with its files distributed over the ranks.
///
/// # Collective
/// All ranks of `world`, which get the same result.
fn verify_together(world: &Group, path: &Path, progress: &Progress) -> Judged {
    let mine = verify_share(path, world.rank(), world.size(), progress);
    judge_together(world, path, mine).inspect(|found| remember(path, found.is_ok()))
}

/// Verifies every `num_ranks`th file of a checkpoint, from file `rank` on.
pub(crate) fn verify_share(
    path: &Path,
    rank: usize,
    num_ranks: usize,
    progress: &Progress,
) -> Result<Checkpoint, CheckpointError> {
    retried(|| {
        let checkpoint = Checkpoint::open(path)?;
        let share = (rank..checkpoint.num_files()).step_by(num_ranks);
        checkpoint.verify_files(share, progress)?;
        Ok(checkpoint)
    })
}

/// The committed checkpoints of a folder, newest first.
fn list(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    Ok(retried(|| committed(dir))?
        .into_iter()
        .map(|(_, path)| path)
        .collect())
}

/// The checkpoint, or why it is refused; an outer error ends the search.
pub(crate) type Judged = Result<Result<Checkpoint, String>, CheckpointError>;

/// The first of `paths` that `judge` accepts. This is the only place that chooses a checkpoint.
fn choose(
    paths: Vec<PathBuf>,
    mut judge: impl FnMut(&Path) -> Judged,
    refuse: impl Fn(&Refused),
) -> Result<Latest, CheckpointError> {
    let mut refused = Vec::new();
    for path in paths {
        match judge(&path)? {
            Ok(checkpoint) => {
                return Ok(Latest {
                    checkpoint: Some(checkpoint),
                    refused,
                });
            }
            Err(why) => {
                let found = Refused { path, why };
                refuse(&found);
                refused.push(found);
            }
        }
    }
    Ok(Latest {
        checkpoint: None,
        refused,
    })
}

pub(crate) fn warn(refused: &Refused) {
    let Refused { path, why } = refused;
    tracing::warn!("checkpoint {} is refused: {why}", path.display());
}

/// Only damage refuses a checkpoint. Falling back for any other reason would replace it by an older
/// step.
fn judge_alone(found: Result<Checkpoint, CheckpointError>) -> Judged {
    match found {
        Ok(checkpoint) => Ok(Ok(checkpoint)),
        Err(error) => match Fault::of(&error) {
            Fault::Damaged | Fault::Missing => Ok(Err(error.to_string())),
            Fault::Unreadable | Fault::OtherVersion => Err(error),
        },
    }
}

/// What one rank found wrong.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ReadCheckpoint {
    fault: Fault,
    message: String,
}

/// The decision of all ranks about a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Verdict {
    Take,
    Refuse { why: String },
    Stop { rank: usize, message: String },
}

/// Agrees on a checkpoint of which each rank has verified some files.
///
/// # Collective
/// All ranks of `world`, which get the same result.
pub(crate) fn judge_together(
    world: &Group,
    path: &Path,
    mine: Result<Checkpoint, CheckpointError>,
) -> Judged {
    let found = mine.as_ref().err();
    let found = found.map(|error| ReadCheckpoint {
        fault: Fault::of(error),
        message: error.to_string(),
    });
    let all: Vec<Option<ReadCheckpoint>> = objects::gather(world, &found)?;
    match objects::broadcast(world, &verdict(&all))? {
        Verdict::Take => mine.map(Ok),
        Verdict::Refuse { why } => Ok(Err(why)),
        Verdict::Stop { rank, message } => Err(match mine {
            Err(error) if Fault::of(&error) == Fault::Missing => {
                let host = host_name();
                let path = path.to_path_buf();
                CheckpointError::NotEverywhere { host, path }
            }
            Err(error) if Fault::of(&error) != Fault::Damaged => error,
            _ => {
                let rank = world.members()[rank];
                CheckpointError::Peer {
                    rank,
                    message,
                    is_damage: false,
                    is_not_finite: false,
                }
            }
        }),
    }
}

fn verdict(all: &[Option<ReadCheckpoint>]) -> Verdict {
    let first = |wanted: &[Fault]| {
        let is_wanted = |found: &&ReadCheckpoint| wanted.contains(&found.fault);
        all.iter().enumerate().find_map(|(rank, found)| {
            let found = found.as_ref().filter(is_wanted)?;
            Some((rank, found.message.clone()))
        })
    };
    if let Some((rank, message)) = first(&[Fault::Unreadable, Fault::OtherVersion]) {
        return Verdict::Stop { rank, message };
    }
    if let Some((_, why)) = first(&[Fault::Damaged]) {
        return Verdict::Refuse { why };
    }
    match first(&[Fault::Missing]) {
        None => Verdict::Take,
        Some((_, why)) if all.iter().all(Option::is_some) => Verdict::Refuse { why },
        Some((rank, message)) => Verdict::Stop { rank, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_damage_that_is_the_same_for_all_refuses_a_checkpoint() {
        let found = |fault| {
            Some(ReadCheckpoint {
                fault,
                message: format!("{fault:?}"),
            })
        };
        let damaged = found(Fault::Damaged);
        let missing = found(Fault::Missing);
        let unreadable = found(Fault::Unreadable);
        let stop = |rank, message: &str| Verdict::Stop {
            rank,
            message: message.to_string(),
        };
        let refuse = |why: &str| Verdict::Refuse {
            why: why.to_string(),
        };
        assert_eq!(verdict(&[None, None]), Verdict::Take);
        assert_eq!(verdict(&[None, damaged.clone()]), refuse("Damaged"));
        assert_eq!(
            verdict(&[missing.clone(), missing.clone()]),
            refuse("Missing")
        );
        assert_eq!(
            verdict(&[missing.clone(), damaged.clone()]),
            refuse("Damaged")
        );
        assert_eq!(verdict(&[None, missing]), stop(1, "Missing"));
        assert_eq!(verdict(&[damaged, unreadable]), stop(1, "Unreadable"));
    }
}
