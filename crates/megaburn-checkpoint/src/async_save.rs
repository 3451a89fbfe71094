//! Saves a checkpoint while the program keeps computing.

use std::{
    mem,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::TensorData;
use megaburn_collective::{Group, Phase, ProcessGroups, Progress, ReduceOp, objects};

use crate::{
    agree::settle,
    background::Background,
    checkpoint::Checkpoint,
    error::CheckpointError,
    folder::checkpoint_path,
    latest::{judge_together, verify_share},
    named_tensor::{NamedTensor, PendingValues},
    report::Report,
    retention::{Retention, delete_old, to_verify, warn_of_damage},
    save::{Guard, UnfinishedCheckpoint, warn_of_retention},
    share::Share,
    snapshot::Snapshot,
    verified::remember,
};

/// A checkpoint that threads of the ranks are writing.
///
/// | stage | work of the threads | then all ranks |
/// |---|---|---|
/// | write | each rank writes and syncs its file | report what they wrote |
/// | commit | rank 0 writes the manifest and gives the folder its final name | learn the result |
/// | verify | each rank reads its share of older checkpoints, if some are to be deleted | agree on them |
/// | delete | rank 0 deletes the checkpoints that are not kept | are done |
///
/// [`advance`](Self::advance) asks whether all threads have ended, and begins the next stage if so.
/// Until the commit, the folder has a temporary name, so a kill leaves the older checkpoints. If
/// the value is dropped in the first stage, the thread stops after the tensor that it is writing,
/// and rank 0 removes the folder; what ranks on other hosts still write may remain until the next
/// [`prepare`](crate::prepare). In the others, dropping it waits for the thread.
///
/// Memory: the values that this rank writes, once, until each is written; and one tensor a second
/// time.
#[derive(Debug)]
pub struct AsyncSave {
    stage: Stage,
    dir: PathBuf,
    snapshot: Arc<Snapshot>,
    retention: Retention,
}

/// A [`Guard`] that threads may call.
pub type SharedGuard = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// What [`AsyncSave::advance`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advance {
    /// Some thread is at work.
    Pending,
    /// The checkpoint is complete and has this path. Older ones may still have to be deleted.
    Committed(PathBuf),
    /// Another stage has begun.
    Continued,
    /// Everything is done.
    Done,
}

/// A checkpoint of which a rank has verified some files, or what it found.
type VerifiedCheckpoint = (PathBuf, Result<Checkpoint, CheckpointError>);

#[derive(Debug)]
enum Stage {
    Write {
        // Dropped first, so that the thread has ended when the folder is removed.
        work: Background<Result<Report, CheckpointError>>,
        folder: UnfinishedCheckpoint,
        guard: Option<OwnGuard>,
    },
    /// Only rank 0 works. It returns the steps of the checkpoints to verify.
    Commit(Option<Background<Result<Vec<u64>, CheckpointError>>>),
    Verify(Background<Vec<VerifiedCheckpoint>>),
    /// Only rank 0 works.
    Delete(Option<Background<Result<(), CheckpointError>>>),
    Done,
}

/// A guard, which has nothing to print.
struct OwnGuard(SharedGuard);

impl std::fmt::Debug for OwnGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnGuard")
    }
}

impl AsyncSave {
    /// Starts to save a checkpoint to `dir/step-XXXXXXXX`, as [`save`](crate::save()) does. When it
    /// returns, no value of `tensors` is needed any more but those that its
    /// [`PendingValues`](crate::PendingValues) hold.
    ///
    /// # Errors
    /// Any rank cannot start: the guard refuses, the folder cannot be created, values cannot be
    /// copied. Every rank gets an error, and nothing of the checkpoint remains.
    /// # Collective
    /// All ranks of `groups.world`; a few messages, none with tensors.
    pub fn begin<'a>(
        dir: &Path,
        retention: &Retention,
        guard: Option<SharedGuard>,
        groups: &ProcessGroups,
        snapshot: Snapshot,
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        let world = &groups.world;
        let _phase = world.phase(Phase::Save);
        let check = guard.as_deref().map(|guard| guard as Guard<'_>);
        let folder = UnfinishedCheckpoint::create(dir, check, groups, snapshot.step)?;
        let (rank, path) = (world.rank(), folder.path.clone());
        // No thread writes before all ranks can, so that a failure leaves an empty folder.
        let share = settle(world, Share::new(tensors, groups).and_then(Share::copied))?;
        let work = Background::start(move |is_cancelled, progress| {
            let read = |values: PendingValues, _| values();
            share.write(&path, rank, read, progress, is_cancelled)
        });
        let stage = Stage::Write {
            work: settle(world, work)?,
            folder,
            guard: guard.map(OwnGuard),
        };
        Ok(Self {
            stage,
            dir: dir.to_path_buf(),
            snapshot: Arc::new(snapshot),
            retention: retention.clone(),
        })
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.snapshot.step
    }

    /// Begins the next stage if the threads of all ranks have ended; does not wait for them.
    ///
    /// # Errors
    /// Any rank's failure to write or commit, or the guard's refusal, on every rank. The older
    /// checkpoints are then unchanged, and nothing of the new one remains. The save is over.
    /// # Collective
    /// All ranks of `groups.world`; one bit, and a few messages at the end of a stage.
    pub fn advance(&mut self, groups: &ProcessGroups) -> Result<Advance, CheckpointError> {
        let world = &groups.world;
        let works = TensorData::from([f64::from(u8::from(!self.stage.is_done()))]);
        let any = world.all_reduce(works, ReduceOp::Max)?;
        if any.as_slice::<f64>().is_ok_and(|any| any[0] == 0.0) {
            self.next(groups)
        } else {
            Ok(Advance::Pending)
        }
    }

    /// Waits for the threads, stage by stage, until the checkpoint is complete and older ones are
    /// deleted. Returns its path.
    ///
    /// # Errors
    /// As [`advance`](Self::advance).
    /// # Collective
    /// All ranks of `groups.world`; a few messages.
    pub fn finish(mut self, groups: &ProcessGroups) -> Result<PathBuf, CheckpointError> {
        while self.next(groups)? != Advance::Done {}
        Ok(checkpoint_path(&self.dir, self.snapshot.step))
    }

    /// Waits for the threads of this stage and begins the next one.
    fn next(&mut self, groups: &ProcessGroups) -> Result<Advance, CheckpointError> {
        let world = &groups.world;
        let phase = world.phase(Phase::Save);
        let progress = phase.progress();
        match mem::replace(&mut self.stage, Stage::Done) {
            Stage::Write {
                work,
                folder,
                guard,
            } => {
                let mine = work.wait(progress).and_then(|report| report);
                let reports = objects::gather(world, &settle(world, mine)?)?;
                let layout = groups.layout().to_string();
                let (snapshot, dir) = (self.snapshot.clone(), self.dir.clone());
                let retention = self.retention.clone();
                let work = folder.into_staging().map(|staging| {
                    Background::start(move |_, _| {
                        let guard = guard.as_ref().map(|guard| &*guard.0 as Guard<'_>);
                        UnfinishedCheckpoint::complete(
                            staging, &dir, guard, &snapshot, layout, reports,
                        )?;
                        let run_id = snapshot.run_id.as_deref();
                        // The checkpoint is complete; what cannot be read is not deleted.
                        let old = to_verify(&dir, run_id, snapshot.step, &retention);
                        Ok(old.unwrap_or_default())
                    })
                });
                self.stage = Stage::Commit(settle(world, work.transpose())?);
                Ok(Advance::Continued)
            }
            Stage::Commit(work) => {
                let old = work.map(|work| work.wait(progress).and_then(|steps| steps));
                let old = settle(world, old.transpose())?.unwrap_or_default();
                let path = checkpoint_path(&self.dir, self.snapshot.step);
                let next = self.begin_verify(groups, &old);
                self.continue_with(groups, next)?;
                Ok(Advance::Committed(path))
            }
            Stage::Verify(work) => {
                let next = judge(world, work, progress).and_then(|()| self.begin_delete(groups));
                self.continue_with(groups, next)?;
                Ok(Advance::Continued)
            }
            Stage::Delete(work) => {
                let deleted = work.map_or(Ok(()), |work| work.wait(progress).and_then(|done| done));
                warn_of_retention(groups, deleted);
                Ok(Advance::Done)
            }
            Stage::Done => Ok(Advance::Done),
        }
    }

    /// Takes the next stage. Once the checkpoint is complete, a failure ends only the deletion of
    /// older ones, unless a rank is gone.
    fn continue_with(
        &mut self,
        groups: &ProcessGroups,
        next: Result<Stage, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        match next {
            Ok(next) => self.stage = next,
            Err(error @ CheckpointError::Collective(_)) => return Err(error),
            Err(error) => warn_of_retention(groups, Err(error)),
        }
        Ok(())
    }

    /// Lets all ranks verify the checkpoints of these steps, which rank 0 knows.
    fn begin_verify(&self, groups: &ProcessGroups, old: &[u64]) -> Result<Stage, CheckpointError> {
        let world = &groups.world;
        let old: Vec<u64> = objects::broadcast(world, &old.to_vec())?;
        if old.is_empty() {
            return self.begin_delete(groups);
        }
        let path = |step: u64| checkpoint_path(&self.dir, step);
        let old: Vec<_> = old.into_iter().map(path).collect();
        let (rank, num_ranks) = (world.rank(), world.size());
        let work = Background::start(move |_, progress| {
            let verify = |path: PathBuf| {
                let found = verify_share(&path, rank, num_ranks, progress);
                (path, found)
            };
            old.into_iter().map(verify).collect()
        });
        Ok(Stage::Verify(settle(world, work)?))
    }

    /// Lets rank 0 delete the checkpoints that `retention` does not keep.
    fn begin_delete(&self, groups: &ProcessGroups) -> Result<Stage, CheckpointError> {
        let (snapshot, dir) = (self.snapshot.clone(), self.dir.clone());
        let retention = self.retention.clone();
        let work = groups.is_main().then(|| {
            Background::start(move |_, _| {
                delete_old(&dir, snapshot.run_id.as_deref(), snapshot.step, &retention)
            })
        });
        Ok(Stage::Delete(settle(&groups.world, work.transpose())?))
    }
}

/// Agrees on the checkpoints that the ranks have verified.
fn judge(
    world: &Group,
    work: Background<Vec<VerifiedCheckpoint>>,
    progress: &Progress,
) -> Result<(), CheckpointError> {
    for (path, mine) in settle(world, work.wait(progress))? {
        let judged = judge_together(world, &path, mine)?;
        remember(&path, judged.is_ok());
        warn_of_damage(world, &path, &judged);
    }
    Ok(())
}

impl Stage {
    /// Whether this rank's thread has ended.
    fn is_done(&self) -> bool {
        match self {
            Self::Write { work, .. } => work.is_done(),
            Self::Commit(work) => work.as_ref().is_none_or(Background::is_done),
            Self::Verify(work) => work.is_done(),
            Self::Delete(work) => work.as_ref().is_none_or(Background::is_done),
            Self::Done => true,
        }
    }
}
