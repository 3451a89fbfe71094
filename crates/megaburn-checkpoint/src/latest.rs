//! Which checkpoint of a folder is used: the newest that is whole.

use std::path::{Path, PathBuf};

use megaburn_collective::{Group, Phase, Progress, host_name, objects};
use serde::{Deserialize, Serialize};

use crate::{
    Checkpoint, CheckpointError,
    agree::settle,
    fault::{Fault, retried},
    folder::committed,
    retention::remember,
};

/// Which checkpoint of a folder is to be used.
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

/// The newest checkpoint in `dir` whose manifest is whole and whose files are there in full length;
/// what is in them is not verified. Nothing is said of those that are refused.
///
/// # Errors
/// The folder or a checkpoint in it cannot be read though it may be whole; the newest was written by
/// another version. A folder that is not there holds no checkpoint.
pub fn newest(dir: &Path) -> Result<Latest, CheckpointError> {
    choose(
        list(dir)?,
        |path| judge_alone(retried(|| Checkpoint::open(path))),
        |_| (),
    )
}

/// The newest checkpoint in `dir` of which every byte is as it was written. Those that are not are
/// refused, which is said by `tracing::warn!`.
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

/// As [`newest_valid`], for all ranks of a run. The warning is rank 0's.
///
/// # Errors
/// As [`newest`]; also a checkpoint that some ranks see and others do not.
/// # Collective
/// All ranks of `world`; each file is verified by one of them, and all get the same answer. Each rank
/// is in [`Phase::Load`] and tells its progress.
pub fn find_latest(dir: &Path, world: &Group) -> Result<Latest, CheckpointError> {
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
    /// Says what is used in place of what was refused.
    fn warn_of_use(&self) {
        if let (Some(used), false) = (&self.checkpoint, self.refused.is_empty()) {
            tracing::warn!("checkpoint {} is used in its place", used.path().display());
        }
    }
}

/// Reads a checkpoint as a whole, each rank its share of the files.
///
/// # Collective
/// All ranks of `world`, which get the same answer.
pub(crate) fn verify_together(world: &Group, path: &Path, progress: &Progress) -> Judged {
    let mine = retried(|| {
        let checkpoint = Checkpoint::open(path)?;
        let share = (world.rank()..checkpoint.num_files()).step_by(world.size());
        checkpoint.verify_files(share, progress)?;
        Ok(checkpoint)
    });
    judge_together(world, path, mine).inspect(|found| remember(path, found.is_ok()))
}

/// The committed checkpoints of a folder, newest first.
fn list(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    Ok(retried(|| committed(dir))?
        .into_iter()
        .map(|(_, path)| path)
        .collect())
}

/// What was found of one checkpoint; an error ends the search.
pub(crate) type Judged = Result<Result<Checkpoint, String>, CheckpointError>;

/// The first of `paths` that `judge` finds whole. This is the only place where a checkpoint is chosen.
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

fn warn(refused: &Refused) {
    let Refused { path, why } = refused;
    tracing::warn!("checkpoint {} is refused: {why}", path.display());
}

/// Damage refuses the checkpoint. Falling back for any other reason would bury it under older steps.
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

/// What all ranks do about a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Verdict {
    Take,
    Refuse { why: String },
    Stop { rank: usize, message: String },
}

fn judge_together(world: &Group, path: &Path, mine: Result<Checkpoint, CheckpointError>) -> Judged {
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
