//! Checks that all ranks see rank 0's folder.

use std::{
    fs,
    path::{self, Path},
    thread::sleep,
    time::{Duration, Instant},
};

use megaburn_collective::{CollectiveError, Group, host_name, objects};
use serde::{Deserialize, Serialize};

use super::{RunFolderError, marker::Marker, names::MARKER};
use crate::error::TrainError;

/// How long a network file system may take to show what another host wrote. NFS caches the
/// attributes of a folder for up to 60 seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(75);

/// How long a rank waits before it logs what it is waiting for.
const QUIET: Duration = Duration::from_secs(5);

/// A rank that does not see the folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FolderDisagreement {
    host: String,
    path: String,
    why: String,
    /// Whether the system failed to read the folder.
    is_fault: bool,
}

/// Checks that every rank finds the marker of `run_id` in `dir`.
///
/// # Errors
/// A rank finds no marker, or another one. All ranks return the same error, which names its host.
/// # Collective
/// All ranks of `world`; a few bytes.
pub(super) fn agree(
    world: &Group,
    dir: &Path,
    run_id: &str,
    patience: Duration,
) -> Result<(), TrainError> {
    let path = path::absolute(dir)
        .unwrap_or_else(|_| dir.to_path_buf())
        .join(MARKER);
    let unseen = look(dir, run_id, patience).err().map(|(why, is_fault)| {
        let host = host_name();
        let path = path.display().to_string();
        FolderDisagreement {
            host,
            path,
            why,
            is_fault,
        }
    });
    match first(world, unseen)? {
        None => Ok(()),
        Some((
            _,
            FolderDisagreement {
                host,
                path,
                why,
                is_fault: true,
            },
        )) => Err(RunFolderError::Unreadable {
            host,
            path: path.into(),
            why,
        }
        .into()),
        Some((
            rank,
            FolderDisagreement {
                host,
                path,
                why,
                is_fault: false,
            },
        )) => Err(RunFolderError::NotShared {
            rank,
            host,
            path: path.into(),
            why,
        }
        .into()),
    }
}

fn first(
    world: &Group,
    mine: Option<FolderDisagreement>,
) -> Result<Option<(usize, FolderDisagreement)>, CollectiveError> {
    let all: Vec<Option<FolderDisagreement>> = objects::gather(world, &mine)?;
    let unseen = |(rank, unseen): (usize, Option<FolderDisagreement>)| {
        Some((world.members()[rank], unseen?))
    };
    let first = all.into_iter().enumerate().find_map(unseen);
    objects::broadcast(world, &first)
}

/// Looks for the marker. The error is what was found instead, and whether the system failed to read
/// it.
fn look(dir: &Path, run_id: &str, patience: Duration) -> Result<(), (String, bool)> {
    let start = Instant::now();
    let mut is_told = false;
    loop {
        let found = match Marker::read(dir) {
            Ok(Some(marker)) if marker.run_id == run_id => return Ok(()),
            Ok(Some(marker)) => (
                format!("belongs to run {}, not {run_id}", marker.run_id),
                false,
            ),
            Ok(None) => ("is not there".to_string(), false),
            Err(RunFolderError::Unreadable { why, .. }) => (why, true),
            Err(error) => (format!("cannot be read ({error})"), false),
        };
        if start.elapsed() >= patience {
            return Err(found);
        }
        if start.elapsed() >= QUIET && !is_told {
            let path = dir.join(MARKER);
            let seconds = patience.as_secs();
            tracing::warn!(
                "rank 0's `{}` {} on host {}: waiting up to {seconds} seconds for it",
                path.display(),
                found.0,
                host_name()
            );
            is_told = true;
        }
        let pause = if is_told {
            Duration::from_secs(1)
        } else {
            Duration::from_millis(50)
        };
        sleep(pause.min(patience));
        // Listing a folder makes a network file system ask its server for the contents.
        for folder in dir.parent().into_iter().chain([dir]) {
            let _ = fs::read_dir(folder).map(Iterator::count);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use megaburn_collective::{GroupOptions, run_threads};

    use super::*;
    use crate::exit::Exit;

    /// The error of each rank if rank 1 looks into another folder.
    fn errors(of_rank: &[PathBuf], run_id: &str) -> Vec<Option<TrainError>> {
        let ranks = run_threads(of_rank.len(), GroupOptions::default(), |world| {
            let dir = &of_rank[world.rank()];
            Ok::<_, TrainError>(agree(&world, dir, run_id, Duration::from_millis(60)).err())
        });
        ranks.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn a_rank_that_sees_another_folder_is_named_on_every_rank() {
        let dir = tempfile::tempdir().unwrap();
        let [shared, empty, other] = ["shared", "empty", "other"].map(|name| dir.path().join(name));
        let marker = Marker::new().unwrap();
        for (dir, marker) in [(&shared, &marker), (&other, &Marker::new().unwrap())] {
            fs::create_dir(dir).unwrap();
            marker.write(dir).unwrap();
        }
        let of = |second: &PathBuf| [shared.clone(), second.clone(), shared.clone()];
        assert!(
            errors(&of(&shared), &marker.run_id)
                .iter()
                .all(Option::is_none)
        );
        for (second, why) in [(&empty, "is not there"), (&other, "belongs to run ")] {
            for error in errors(&of(second), &marker.run_id) {
                let error = error.unwrap();
                let text = error.to_string();
                assert!(
                    text.contains("rank 1 on host ") && text.contains(why),
                    "{text}"
                );
                assert!(
                    text.contains(&second.join(MARKER).display().to_string()),
                    "{text}"
                );
                assert_eq!(error.exit(), Exit::BadInput);
            }
        }
    }
}
