use std::{collections::BTreeSet, path::Path};

use megaburn_checkpoint::{Checkpoint, CheckpointStore, Latest, Place, checkpoint_step};
use megaburn_collective::{Group, ProcessGroups, objects};
use serde::{Deserialize, Serialize};

use crate::{
    error::TrainError,
    run_folder::names::{CHECKPOINTS, METRICS, names_in},
    start::settle,
};

/// What a start finds in the store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Found {
    /// The run that a run in an empty folder continues.
    pub(super) continued_run: Option<String>,
    /// The steps of the run's complete checkpoints, newest first.
    steps: Vec<u64>,
}

impl Found {
    /// Looks at the store on rank 0, and removes what killed uploads of the run have left.
    ///
    /// # Collective
    /// All ranks of `world`.
    pub(super) fn look(
        world: &Group,
        store: &CheckpointStore,
        dir: &Path,
        run_id: &str,
        fresh: bool,
    ) -> Result<Self, TrainError> {
        let look = || Self::look_alone(store, dir, run_id, fresh);
        let found = settle(world, (world.rank() == 0).then(look).transpose())?;
        Ok(objects::broadcast(world, &found.unwrap_or_default())?)
    }

    fn look_alone(
        store: &CheckpointStore,
        dir: &Path,
        run_id: &str,
        fresh: bool,
    ) -> Result<Self, TrainError> {
        let all = store.list()?;
        let marks: BTreeSet<&str> = all.iter().flat_map(|stored| stored.marks()).collect();
        let refused = |found: &str, why: String| TrainError::StoredRun {
            url: store.url().into(),
            found: found.into(),
            why,
        };
        if let Some(found) = marks.first().filter(|_| fresh) {
            let why = "and --fresh begins another run: choose another prefix, or start without \
                       --fresh";
            return Err(refused(found, why.into()));
        }
        let is_only = marks.len() == 1 && is_empty(dir);
        let continued_run = match marks.iter().find(|id| **id != run_id) {
            None => None,
            Some(other) if is_only => Some((*other).to_owned()),
            Some(other) => {
                let why = format!(
                    "but run.dir `{}` has run {run_id}: choose another prefix, or start in an empty \
                     run.dir to continue run {other}",
                    dir.display()
                );
                return Err(refused(other, why));
            }
        };
        let run_id = continued_run.as_deref().unwrap_or(run_id);
        store.remove_leftovers(&all, run_id)?;
        let own = all.iter().rev();
        let own = own.filter(|stored| stored.is_complete() && stored.is_of(run_id));
        Ok(Self {
            steps: own.map(|stored| stored.step).collect(),
            continued_run,
        })
    }

    /// Whether the store has the complete checkpoint of a step.
    pub(super) fn has(&self, step: u64) -> bool {
        self.steps.contains(&step)
    }

    /// The steps that are newer than the newest intact checkpoint on this host, newest first.
    pub(super) fn newer(&self, latest: &Latest) -> impl Iterator<Item = u64> {
        let newest = latest.checkpoint.as_ref().map(Checkpoint::step);
        let steps = self.steps.iter().copied();
        steps.filter(move |step| newest.is_none_or(|newest| *step > newest))
    }

    /// Copies the newest intact one of these checkpoints to `place`.
    ///
    /// # Errors
    /// One cannot be copied; all are damaged, and there is no other.
    /// # Collective
    /// All ranks.
    pub(super) fn fetch(
        &self,
        store: &CheckpointStore,
        latest: &Latest,
        place: &Place,
        groups: &ProcessGroups,
    ) -> Result<(), TrainError> {
        let newest = latest.checkpoint.as_ref().map(Checkpoint::step);
        let mut damaged = None;
        for step in self.newer(latest) {
            if groups.is_main() {
                let (url, dir) = (store.url_of(step), place.dir().display());
                match newest {
                    Some(newest) => tracing::warn!(
                        "the newest checkpoint in {dir} is that of step {newest}: {url} is copied \
                         there"
                    ),
                    None => tracing::warn!("{dir} has no checkpoint: {url} is copied there"),
                }
            }
            match store.download(step, place, groups) {
                Ok(_) => return Ok(()),
                Err(error) if error.is_damage() => {
                    if groups.is_main() {
                        tracing::warn!("{error}; an older checkpoint is used");
                    }
                    damaged.get_or_insert(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        match damaged {
            Some(error) if newest.is_none() => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Whether a run has not begun in its folder: it has neither checkpoints nor metrics.
fn is_empty(dir: &Path) -> bool {
    let has_checkpoint = |names: Vec<String>| {
        let mut names = names.iter();
        names.any(|name| checkpoint_step(name).is_some())
    };
    let checkpoints = names_in(&dir.join(CHECKPOINTS));
    !dir.join(METRICS).exists() && !checkpoints.is_ok_and(has_checkpoint)
}
