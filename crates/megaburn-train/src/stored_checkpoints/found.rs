use std::{
    collections::BTreeSet,
    io::ErrorKind,
    path::{Path, PathBuf},
};

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
    /// Looks at the store on rank 0. Nothing is written.
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
        let mut owned = Vec::new();
        for stored in &all {
            owned.push((stored, store.runs_of(stored)?));
        }
        let runs: BTreeSet<&str> = owned
            .iter()
            .flat_map(|(_, runs)| runs.iter().map(String::as_str))
            .collect();
        let refused = |found: &str, why: String| TrainError::StoredRun {
            url: store.url().into(),
            found: found.into(),
            why,
        };
        if let Some(found) = runs.first().filter(|_| fresh) {
            let why = "and --fresh begins another run: choose another prefix, or start without \
                       --fresh";
            return Err(refused(found, why.into()));
        }
        let is_only = runs.len() == 1 && is_empty(dir)?;
        let continued_run = match runs.iter().find(|id| **id != run_id) {
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
        let is_own = |runs: &BTreeSet<String>| runs.len() == 1 && runs.contains(run_id);
        let own = owned.iter().rev();
        let own = own.filter(|(stored, runs)| stored.is_complete() && is_own(runs));
        Ok(Self {
            steps: own.map(|(stored, _)| stored.step).collect(),
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
///
/// # Errors
/// The folder cannot be read, so the run may have begun.
fn is_empty(dir: &Path) -> Result<bool, TrainError> {
    let unread = |path: PathBuf| |source| TrainError::Read { path, source };
    let metrics = dir.join(METRICS);
    if metrics.try_exists().map_err(unread(metrics))? {
        return Ok(false);
    }
    let checkpoints = dir.join(CHECKPOINTS);
    match names_in(&checkpoints) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
        names => {
            let names = names.map_err(unread(checkpoints))?;
            Ok(!names.iter().any(|name| checkpoint_step(name).is_some()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_that_cannot_be_read_is_not_empty() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path();
        assert!(is_empty(here).unwrap() && is_empty(&here.join("none")).unwrap());
        // A file in place of the folder: its names cannot be listed.
        fs::write(here.join(CHECKPOINTS), "").unwrap();
        let error = is_empty(here).unwrap_err().to_string();
        assert!(error.contains("checkpoints`"), "{error}");
        fs::remove_file(here.join(CHECKPOINTS)).unwrap();
        fs::create_dir_all(here.join(CHECKPOINTS).join("notes")).unwrap();
        assert!(is_empty(here).unwrap());
        fs::create_dir(here.join(CHECKPOINTS).join("step-00000003")).unwrap();
        assert!(!is_empty(here).unwrap());
        fs::remove_dir_all(here.join(CHECKPOINTS)).unwrap();
        fs::write(here.join(METRICS), "").unwrap();
        assert!(!is_empty(here).unwrap());
    }
}
