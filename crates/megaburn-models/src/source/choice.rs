//! Selects and verifies the checkpoint of a run.

use std::path::{Path, PathBuf};

use megaburn_checkpoint::{Checkpoint, Latest, find_latest, newest_valid};
use megaburn_collective::{Group, Phase};

use super::ModelSource;
use crate::error::ModelError;

impl ModelSource {
    /// Like [`open`](Self::open), but also verifies the hashes of a checkpoint's files. For a run,
    /// it opens the newest intact checkpoint; damaged ones are refused with `tracing::warn!`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_verified(path: &Path) -> Result<Self, ModelError> {
        let source = Self::open_by(path, newest_valid)?;
        if source.run_checkpoints().is_none() {
            source.verify()?;
        }
        Ok(source)
    }

    /// The folder of the run's checkpoints, if the source is a run.
    fn run_checkpoints(&self) -> Option<PathBuf> {
        let checkpoint = self.checkpoint()?;
        (checkpoint.path() != self.path).then(|| self.path.join("checkpoints"))
    }

    /// Verifies the weights and makes all ranks use the same checkpoint. For a run, that is the
    /// newest intact checkpoint; it is returned if it differs from the one that this rank opened.
    /// Damaged checkpoints are refused, and rank 0 reports them with `tracing::warn!`.
    ///
    /// # Errors
    /// A checkpoint is damaged or cannot be read, or the run has no intact checkpoint.
    /// # Collective
    /// All ranks of `world`. The ranks verify a run's checkpoint together; any other checkpoint is
    /// verified by rank 0.
    pub fn agreed(&self, world: &Group) -> Result<Option<Self>, ModelError> {
        let Some(checkpoints) = self.run_checkpoints() else {
            if world.rank() == 0 {
                self.verify_with(world.phase(Phase::Load).progress())?;
            }
            return Ok(None);
        };
        let found = chosen(find_latest(&checkpoints, world)?, &checkpoints)?;
        let is_mine = self
            .checkpoint()
            .is_some_and(|mine| mine.path() == found.path());
        if is_mine {
            Ok(None)
        } else {
            Self::open_checkpoint(&self.path, found).map(Some)
        }
    }
}

/// The selected checkpoint of a folder, or an error that says why there is none.
pub(super) fn chosen(latest: Latest, folder: &Path) -> Result<Checkpoint, ModelError> {
    let Latest {
        checkpoint,
        refused,
    } = latest;
    checkpoint.ok_or_else(|| match refused.into_iter().next() {
        Some(newest) => {
            let why = format!(
                "is damaged, and no other checkpoint is intact: {}",
                newest.why
            );
            ModelError::File {
                path: newest.path,
                why,
            }
        }
        None => ModelError::File {
            path: folder.to_path_buf(),
            why: "contains no checkpoint".into(),
        },
    })
}
