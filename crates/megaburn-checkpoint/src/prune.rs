//! Deletes old checkpoints of a run that is not in progress, by the rules of `retention.rs`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    checkpoint::Checkpoint, error::CheckpointError, examine::examine, fault::retried,
    folder::committed, latest::Refused, manifest::MANIFEST_HASH, remove::remove_checkpoint,
    retention::Retention,
};

/// The checkpoints to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrunePlan {
    dir: PathBuf,
    run_id: String,
    /// The run's checkpoints when they were verified, with the hashes of their manifests.
    seen: BTreeMap<PathBuf, String>,
    /// Verified checkpoints that stay, newest first.
    pub kept: Vec<(u64, PathBuf)>,
    /// Checkpoints to delete, newest first.
    pub deleted: Vec<(u64, PathBuf)>,
    /// Damaged checkpoints of the run that were verified. They stay and do not count as kept.
    pub damaged: Vec<Refused>,
    /// Number of committed checkpoints in the folder that are not the run's, or whose manifest or
    /// files are incomplete. They stay and do not count as kept.
    pub num_others: usize,
}

/// Decides which checkpoints of the run `run_id` in the folder `dir` are old, and verifies all that
/// stay. Nothing is deleted. `on_bytes` is called with numbers of bytes as they are read.
///
/// Checkpoints that another run or a conversion wrote are neither counted nor deleted, and neither
/// are damaged ones, because one may be all that is left of a step.
///
/// # Errors
/// The folder or a checkpoint cannot be read.
pub fn plan_prune(
    dir: &Path,
    run_id: &str,
    retention: &Retention,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<PrunePlan, CheckpointError> {
    let all = retried(|| committed(dir))?;
    let num_all = all.len();
    let own = own_checkpoints(all, run_id);
    let mut plan = PrunePlan {
        dir: dir.to_path_buf(),
        run_id: run_id.to_string(),
        seen: own
            .iter()
            .map(|(_, path)| (path.clone(), hash_of(path)))
            .collect(),
        kept: Vec::new(),
        deleted: own,
        damaged: Vec::new(),
        num_others: 0,
    };
    plan.num_others = num_all - plan.deleted.len();
    while plan.kept.len() < retention.newest || retention.newest == 0 {
        if plan.deleted.is_empty() {
            return Ok(plan);
        }
        plan.verify(0, on_bytes)?;
    }
    // If one that was to stay is damaged, another may be among the best.
    loop {
        let kept = plan.kept.iter().chain(&plan.deleted);
        let others = retention.kept(kept.map(|(step, _)| *step));
        let mut old = plan.deleted.iter();
        let Some(next) = old.position(|(step, _)| others.contains(step)) else {
            return Ok(plan);
        };
        plan.verify(next, on_bytes)?;
    }
}

impl PrunePlan {
    /// Verifies a checkpoint that would be deleted, which then stays.
    fn verify(
        &mut self,
        index: usize,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<(), CheckpointError> {
        let (step, path) = self.deleted.remove(index);
        match examine(&path, on_bytes)?.damage.first() {
            None => self.kept.push((step, path)),
            Some(damage) => {
                let why = format!("{}: {}", damage.file.display(), damage.why);
                self.damaged.push(Refused { path, why });
            }
        }
        Ok(())
    }

    /// Deletes the old checkpoints, oldest first. The caller holds the run's folder, so that no run
    /// starts meanwhile.
    ///
    /// # Errors
    /// The run's checkpoints are no longer those that were verified; one cannot be deleted.
    pub fn delete(&self) -> Result<(), CheckpointError> {
        let now = own_checkpoints(retried(|| committed(&self.dir))?, &self.run_id);
        let now = now.into_iter().map(|(_, path)| (hash_of(&path), path));
        let now: BTreeMap<_, _> = now.map(|(hash, path)| (path, hash)).collect();
        if now != self.seen {
            return Err(CheckpointError::Changed {
                path: self.dir.clone(),
            });
        }
        let oldest_first = self.deleted.iter().rev();
        oldest_first
            .into_iter()
            .try_for_each(|(_, path)| remove_checkpoint(path))
    }
}

/// The run's checkpoints whose manifests are whole and whose files have their full length.
fn own_checkpoints(mut all: Vec<(u64, PathBuf)>, run_id: &str) -> Vec<(u64, PathBuf)> {
    let is_own = |path: &Path| {
        Checkpoint::open(path).is_ok_and(|found| found.manifest().run_id.as_deref() == Some(run_id))
    };
    all.retain(|(_, path)| is_own(path));
    all
}

/// The hash of a checkpoint's manifest, which changes with its contents.
fn hash_of(path: &Path) -> String {
    fs::read_to_string(path.join(MANIFEST_HASH)).unwrap_or_default()
}
