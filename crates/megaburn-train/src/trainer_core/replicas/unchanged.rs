//! What a rank holds between two updates must not change.

use burn::module::Module;
use megaburn_collective::objects;

use super::hashes::RangeHash;
use crate::{error::TrainError, state_name::StateName, trainer_core::TrainerCore};

/// The state of a rank after an update, and what changed in it before the next one.
#[derive(Debug, Default)]
pub(crate) struct Unchanged {
    /// Hashes after the last update, if the next one is to compare them.
    after_update: Option<Vec<RangeHash>>,
    /// A tensor that had other values before the next update.
    changed: Option<StateName>,
}

impl Unchanged {
    /// Forgets the hashes, before something other than an update changes the state.
    pub(crate) fn forget(&mut self) {
        self.after_update = None;
    }
}

impl<M: Module> TrainerCore<M> {
    /// Remembers the hashes of what this rank holds, which the next update compares. Gathered weights
    /// are among them: the update replaces a copy with a flipped bit, but the gradient has seen it.
    pub(super) fn remember(&mut self, hashes: Vec<RangeHash>) {
        self.unchanged.after_update = Some(hashes);
    }

    /// Looks for a tensor that is not what the last update left, if its hashes were remembered. The
    /// ranks learn of it in [`check_unchanged`](Self::check_unchanged).
    ///
    /// # Errors
    /// A device cannot be read.
    pub(crate) fn find_changed(&mut self) -> Result<(), TrainError> {
        if let Some(before) = self.unchanged.after_update.take() {
            let now = self.state_hashes()?;
            let mut pairs = before.into_iter().zip(now);
            let changed = pairs.find(|(before, now)| before != now);
            self.unchanged.changed = changed.map(|(before, _)| before.name);
        }
        Ok(())
    }

    /// Whether this rank has found that its state has changed.
    pub(crate) fn has_changed(&self) -> bool {
        self.unchanged.changed.is_some()
    }

    /// The error that names the first rank whose state has changed, if that of any has.
    ///
    /// # Errors
    /// The state of a rank has changed, or a failed collective.
    /// # Collective
    /// All ranks.
    pub(crate) fn check_unchanged(&self) -> Result<(), TrainError> {
        let world = &self.groups.world;
        let all: Vec<Option<StateName>> = objects::gather(world, &self.unchanged.changed)?;
        let name = |(rank, tensor): (usize, Option<StateName>)| Some((rank, tensor?));
        let first = all.into_iter().enumerate().find_map(name);
        match objects::broadcast(world, &first)? {
            None => Ok(()),
            Some((rank, tensor)) => {
                let step = self.progress.step + 1;
                Err(TrainError::StateChanged {
                    step,
                    rank,
                    tensor,
                    is_own: rank == world.rank(),
                })
            }
        }
    }
}
