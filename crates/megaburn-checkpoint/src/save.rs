//! Saves a checkpoint from all ranks of a run.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use megaburn_collective::{Phase, ProcessGroups, objects};

use crate::{
    agree::settle,
    atomic_dir::AtomicDir,
    error::CheckpointError,
    folder::checkpoint_path,
    named_tensor::{NamedTensor, Values},
    report::{Report, merge, write_manifest},
    retention::{Retention, retain},
    share::Share,
    snapshot::Snapshot,
};

/// Returns an error if the folder of checkpoints must not be written to, for instance because
/// another run uses it. Rank 0 calls it before the first byte is written and before the commit.
pub type Guard<'a> = &'a dyn Fn() -> Result<(), String>;

/// Saves a checkpoint to `dir/step-XXXXXXXX` and returns that path. A checkpoint of the same step
/// is replaced. With a `guard`, the folder `dir` must exist and is not created.
///
/// Afterwards only the checkpoints that `retention` keeps remain of the run that `snapshot` names.
/// Before older ones are deleted, the ranks verify the remaining ones, each once per process.
///
/// Every element is written once. The ranks that hold copies of a piece each write an equal share
/// ([`WritePlan`](crate::WritePlan)) to a file of their own, and nothing is gathered. Only the
/// values that a rank writes are requested, one tensor at a time.
///
/// # Errors
/// Any rank's failure or the guard's refusal, on every rank. The older checkpoints are then
/// unchanged, and nothing of the new one remains. Tensors that the ranks' pieces do not tile
/// exactly once are refused.
/// # Collective
/// All ranks of `groups.world`; a few messages, none with tensors. Each rank enters [`Phase::Save`]
/// and reports its progress.
pub fn save<'a>(
    dir: &Path,
    retention: &Retention,
    guard: Option<Guard<'_>>,
    groups: &ProcessGroups,
    snapshot: &Snapshot,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
) -> Result<PathBuf, CheckpointError> {
    let world = &groups.world;
    let phase = world.phase(Phase::Save);
    let folder = UnfinishedCheckpoint::create(dir, guard, groups, snapshot.step)?;
    let share = Share::new(tensors, groups);
    let never = AtomicBool::new(false);
    let read = |values: Values<'_>, range| values(range)?();
    let mine = share
        .and_then(|share| share.write(&folder.path, world.rank(), read, phase.progress(), &never));
    let path = folder.commit(guard, groups, snapshot, mine)?;
    let run_id = snapshot.run_id.as_deref();
    let retained = retain(
        world,
        dir,
        run_id,
        snapshot.step,
        retention,
        phase.progress(),
    );
    warn_of_retention(groups, retained);
    Ok(path)
}

/// Old checkpoints that cannot be deleted do not fail a save.
pub(crate) fn warn_of_retention(groups: &ProcessGroups, retained: Result<(), CheckpointError>) {
    if let Err(error) = retained
        && groups.is_main()
    {
        tracing::warn!("old checkpoints were not deleted: {error}");
    }
}

/// The folder into which all ranks write before it gets its final name.
#[derive(Debug)]
pub(crate) struct UnfinishedCheckpoint {
    /// The folder of checkpoints, as this rank sees it.
    dir: PathBuf,
    /// The folder, as this rank sees it.
    pub(crate) path: PathBuf,
    /// Only on rank 0, which removes the folder if it is dropped before the commit.
    staging: Option<AtomicDir>,
}

impl UnfinishedCheckpoint {
    /// Creates the folder.
    ///
    /// # Collective
    /// All ranks of `groups.world`.
    pub(crate) fn create(
        dir: &Path,
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
        step: u64,
    ) -> Result<Self, CheckpointError> {
        let world = &groups.world;
        let target = checkpoint_path(dir, step);
        let create = || match guard {
            Some(_) => check(guard, dir).and_then(|()| AtomicDir::inside(&target)),
            None => AtomicDir::create(&target),
        };
        let staging = groups.is_main().then(create).transpose();
        let staging = settle(world, staging)?;
        // Only the name is sent, because ranks on other hosts may see the folder under another path.
        let name = staging
            .as_ref()
            .and_then(|staging| staging.path.file_name());
        let name: Option<String> =
            objects::broadcast(world, &name.map(|name| name.to_string_lossy().into_owned()))?;
        let name = name.expect("rank 0 created the folder");
        Ok(Self {
            dir: dir.to_path_buf(),
            path: dir.join(name),
            staging,
        })
    }

    /// Completes the checkpoint with its manifest and gives it its final name. `mine` is what this
    /// rank wrote, or its error.
    ///
    /// # Collective
    /// All ranks of `groups.world`.
    pub(crate) fn commit(
        self,
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
        snapshot: &Snapshot,
        mine: Result<Report, CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        let world = &groups.world;
        let dir = self.dir.clone();
        let reports = objects::gather(world, &settle(world, mine)?)?;
        let layout = groups.layout().to_string();
        let committed = self
            .into_staging()
            .map(|staging| Self::complete(staging, &dir, guard, snapshot, layout, reports));
        settle(world, committed.transpose())?;
        Ok(checkpoint_path(&dir, snapshot.step))
    }

    /// The folder in progress, on rank 0.
    pub(crate) fn into_staging(self) -> Option<AtomicDir> {
        self.staging
    }

    /// Writes the manifest into the folder `staging` and gives it its final name.
    pub(crate) fn complete(
        staging: AtomicDir,
        dir: &Path,
        guard: Option<Guard<'_>>,
        snapshot: &Snapshot,
        layout: String,
        reports: Vec<Report>,
    ) -> Result<(), CheckpointError> {
        let manifest = merge(snapshot, layout, reports)?;
        write_manifest(&staging.path, &manifest)?;
        // Check a second time, because another run may have started during the write.
        check(guard, dir)?;
        staging.commit()
    }
}

fn check(guard: Option<Guard<'_>>, dir: &Path) -> Result<(), CheckpointError> {
    let guarded = guard.map_or(Ok(()), |guard| guard());
    guarded.map_err(|why| CheckpointError::Guarded {
        path: dir.to_path_buf(),
        why,
    })
}
