//! Which checkpoint of a run is the model.

use std::path::{Path, PathBuf};

use megaburn_checkpoint::{Checkpoint, Latest, find_latest, newest_valid};
use megaburn_collective::{Group, Phase};

use super::ModelSource;
use crate::ModelError;

impl ModelSource {
    /// As [`open`](Self::open); a checkpoint's files are compared with their hashes too. Of a run the
    /// newest checkpoint is taken that is whole; those that are not are refused, which is said by
    /// `tracing::warn!`.
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

    /// The folder of the run's checkpoints, if what was opened is a run.
    fn run_checkpoints(&self) -> Option<PathBuf> {
        let checkpoint = self.checkpoint()?;
        (checkpoint.path() != self.path).then(|| self.path.join("checkpoints"))
    }

    /// Verifies the weights, and has all ranks use the same. Of a run the newest checkpoint is taken
    /// that is whole, which is returned where it is another than this rank opened. Those that are
    /// not whole are refused, which rank 0 says by `tracing::warn!`.
    ///
    /// # Errors
    /// A checkpoint that is damaged or cannot be read; a run without a whole one.
    /// # Collective
    /// All ranks of `world`; the work of a run's checkpoint is shared, any other is verified by rank 0.
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

/// The checkpoint that is used of those in a folder.
pub(super) fn chosen(latest: Latest, folder: &Path) -> Result<Checkpoint, ModelError> {
    let Latest {
        checkpoint,
        refused,
    } = latest;
    checkpoint.ok_or_else(|| match refused.into_iter().next() {
        Some(newest) => {
            let why = format!("is damaged, and no other is whole: {}", newest.why);
            ModelError::File {
                path: newest.path,
                why,
            }
        }
        None => ModelError::File {
            path: folder.to_path_buf(),
            why: "holds no checkpoint".into(),
        },
    })
}
