//! Saves a checkpoint while the program keeps computing.

use std::{
    fmt, mem,
    path::PathBuf,
    sync::{Arc, mpsc},
};

use burn::tensor::TensorData;
use megaburn_collective::{Group, Phase, ProcessGroups, ReduceOp, objects};

use crate::{
    agree::settle,
    background::{Background, WRITER},
    error::CheckpointError,
    folder::checkpoint_path,
    named_tensor::{NamedTensor, PendingValues},
    place::Place,
    retention::{
        Known, Retention, all_known, delete_steps, known, steps_to_delete, steps_to_verify, update,
    },
    save::warn_of_retention,
    save_stage::Stage,
    share::Share,
    snapshot::Snapshot,
    unfinished_checkpoint::{Guard, Sealed, UnfinishedCheckpoint, all_or_none},
    verification::{examine, judge},
};

/// A checkpoint that threads of the ranks are writing.
///
/// | stage | work of the threads | then all ranks |
/// |---|---|---|
/// | write | each rank hashes, writes and syncs its file, each on a thread | report what they wrote |
/// | seal | rank 0 makes the manifest | learn which files they send, if each host has a folder of its own |
/// | replicate | each rank sends its file to other hosts, if each has a folder of its own | learn the result |
/// | commit | rank 0, or the first rank of each host, writes the manifest and gives the folder its final name | learn the result |
/// | verify | each rank reads its share of older checkpoints, if some are to be deleted | agree on them |
/// | delete | the same ranks delete the checkpoints that are not kept | are done |
///
/// [`advance`](Self::advance) asks whether all threads have ended, and begins the next stage if so.
/// Until the commit, the folder has a temporary name, so a kill leaves the older checkpoints. If
/// the value is dropped before that, the threads stop after what they have read, and rank 0, or the
/// first rank of each host, removes the folder; what ranks on other hosts still write may remain
/// until the next [`prepare`](crate::prepare). After the commit, dropping it waits for the thread.
///
/// Memory: the values that this rank writes, once, until each is written. A [`PendingValues`] may
/// keep more than what it returns, such as the whole tensor of a part. If reading values copies them,
/// also up to 256 MiB of such copies, or one tensor if it is larger. While files are copied to
/// other hosts, up to 16 MiB for each of 8 transfers at a time.
#[derive(Debug)]
pub struct AsyncSave {
    stage: Stage,
    place: Place,
    snapshot: Arc<Snapshot>,
    retention: Retention,
    guard: Option<OwnGuard>,
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

/// A guard, which has nothing to print.
#[derive(Clone)]
struct OwnGuard(SharedGuard);

impl fmt::Debug for OwnGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OwnGuard")
    }
}

impl AsyncSave {
    /// Starts to save a checkpoint to `step-XXXXXXXX` in a place, as [`save`](crate::save()) does.
    /// When it returns, no value of `tensors` is needed any more but those that its
    /// [`PendingValues`](crate::PendingValues) hold.
    ///
    /// # Errors
    /// Any rank cannot start: the guard refuses, the folder cannot be created, values cannot be
    /// copied. Every rank gets an error, and nothing of the checkpoint remains.
    /// # Collective
    /// All ranks of `groups.world`; a few messages, none with tensors.
    pub fn begin<'a>(
        place: impl Into<Place>,
        retention: &Retention,
        guard: Option<SharedGuard>,
        groups: &ProcessGroups,
        snapshot: Snapshot,
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        let place = place.into();
        let world = &groups.world;
        let _phase = world.phase(Phase::Save);
        let check = guard.as_deref().map(|guard| guard as Guard<'_>);
        let folder = UnfinishedCheckpoint::create(&place, check, groups, snapshot.step)?;
        let (rank, path) = (world.rank(), folder.path().to_path_buf());
        // No thread writes before all ranks can, so that a failure leaves an empty folder.
        let share = settle(world, Share::new(tensors, groups).and_then(Share::copied))?;
        let work = Background::start(WRITER, move |is_cancelled, progress| {
            let read = |values: PendingValues, _| values();
            share.write(&path, rank, read, progress, is_cancelled)
        });
        let work = settle(world, work)?;
        Ok(Self {
            stage: Stage::Write { work, folder },
            place,
            snapshot: Arc::new(snapshot),
            retention: retention.clone(),
            guard: guard.map(OwnGuard),
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
        Ok(self.path())
    }

    fn path(&self) -> PathBuf {
        checkpoint_path(self.place.dir(), self.snapshot.step)
    }

    /// Waits for the threads of this stage and begins the next one.
    fn next(&mut self, groups: &ProcessGroups) -> Result<Advance, CheckpointError> {
        let world = &groups.world;
        let phase = world.phase(Phase::Save);
        let progress = phase.progress();
        match mem::replace(&mut self.stage, Stage::Done) {
            Stage::Write { work, folder } => {
                let mine = work.wait(progress).and_then(|report| report);
                let reports = objects::gather(world, &settle(world, mine)?)?;
                let (layout, snapshot) = (groups.layout().to_string(), self.snapshot.clone());
                let place = self.place.clone();
                let seal = move |_: &_, _: &_| Sealed::new(&place, &snapshot, layout, reports);
                let work = groups.is_main().then(|| Background::start(WRITER, seal));
                let work = settle(world, work.transpose())?;
                self.stage = Stage::Seal { work, folder };
                Ok(Advance::Continued)
            }
            Stage::Seal { work, folder } => {
                let sealed = work.map(|work| work.wait(progress).and_then(|sealed| sealed));
                let sealed = settle(world, sealed.transpose())?;
                let sealed = Sealed::agreed(sealed, &self.place, world)?;
                self.stage = match self.place.hosts() {
                    None => self.begin_commit(world, folder, sealed)?,
                    Some(_) => begin_replicate(world, folder, sealed)?,
                };
                Ok(Advance::Continued)
            }
            Stage::Replicate { work, folder } => {
                let done = work.wait(progress).and_then(|sealed| sealed);
                // The folder of a rank that failed stays until the ranks that write to it have
                // ended.
                let sealed = settle(world, done)?;
                let folder = Arc::into_inner(folder).expect("the thread has ended");
                self.stage = self.begin_commit(world, folder, sealed)?;
                Ok(Advance::Continued)
            }
            Stage::Commit(work) => {
                let mine = work.wait(progress).and_then(|own| own);
                let (own, done) = match mine {
                    Ok(own) => (own, Ok(())),
                    Err(error) => (Vec::new(), Err(error)),
                };
                all_or_none(world, &self.place, self.snapshot.step, done)?;
                let own = all_known(world, &own)?;
                let next = self.begin_verify(groups, own);
                self.continue_with(groups, next)?;
                Ok(Advance::Committed(self.path()))
            }
            Stage::Verify { work, mut own } => {
                let parts = settle(world, work.wait(progress));
                let judged = parts.and_then(|parts| {
                    let mut parts = parts.into_iter();
                    parts.try_for_each(|(path, found)| judge(world, &self.place, &path, found))
                });
                update(&mut own, &self.place);
                let next = judged.and_then(|()| self.begin_delete(groups, &own));
                self.continue_with(groups, next)?;
                Ok(Advance::Continued)
            }
            Stage::Delete(work) => {
                let deleted = work.wait(progress).and_then(|done| done);
                let deleted = match settle(world, deleted) {
                    Err(error @ CheckpointError::Collective(_)) => return Err(error),
                    deleted => deleted,
                };
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

    /// Gives the folder its final name, and finds out which checkpoints count for the retention.
    fn begin_commit(
        &self,
        world: &Group,
        folder: UnfinishedCheckpoint,
        sealed: Sealed,
    ) -> Result<Stage, CheckpointError> {
        let (place, snapshot) = (self.place.clone(), self.snapshot.clone());
        let guard = self.guard.clone();
        let keeps_all = self.retention.newest == 0;
        let is_keeper = place.is_keeper(world);
        let work = Background::start(WRITER, move |_, progress| {
            let guard = guard.as_ref().map(|guard| &*guard.0 as Guard<'_>);
            folder.complete(guard, &sealed)?;
            if keeps_all || !is_keeper {
                return Ok(Vec::new());
            }
            let run_id = snapshot.run_id.as_deref();
            // The checkpoint is complete; a rank that cannot read its folder deletes nothing there.
            Ok(known(&place, run_id, snapshot.step, progress).unwrap_or_default())
        });
        Ok(Stage::Commit(settle(world, work)?))
    }

    /// Starts to verify the checkpoints that must be intact before others are deleted. `own`
    /// counts on rank 0.
    fn begin_verify(
        &self,
        groups: &ProcessGroups,
        own: Vec<Known>,
    ) -> Result<Stage, CheckpointError> {
        let world = &groups.world;
        let steps = steps_to_verify(world, &own, &self.retention)?;
        if steps.is_empty() {
            return self.begin_delete(groups, &own);
        }
        let place = self.place.clone();
        let (rank, num_ranks) = (world.rank(), world.size());
        let work = Background::start(WRITER, move |_, progress| {
            let verify = |step| {
                let path = checkpoint_path(place.dir(), step);
                let found = examine(&place, rank, num_ranks, &path, progress);
                (path, found)
            };
            steps.into_iter().map(verify).collect()
        });
        let work = settle(world, work)?;
        Ok(Stage::Verify { work, own })
    }

    /// Deletes the checkpoints that `retention` does not keep.
    fn begin_delete(
        &self,
        groups: &ProcessGroups,
        own: &[Known],
    ) -> Result<Stage, CheckpointError> {
        let world = &groups.world;
        let steps = steps_to_delete(world, own, &self.retention)?;
        if steps.is_empty() {
            return Ok(Stage::Done);
        }
        let (place, snapshot) = (self.place.clone(), self.snapshot.clone());
        let is_keeper = place.is_keeper(world);
        let work = Background::start(WRITER, move |_, _| match is_keeper {
            true => delete_steps(&place, snapshot.run_id.as_deref(), &steps),
            false => Ok(()),
        });
        Ok(Stage::Delete(settle(world, work)?))
    }
}

/// Copies the files to other hosts.
fn begin_replicate(
    world: &Group,
    folder: UnfinishedCheckpoint,
    sealed: Sealed,
) -> Result<Stage, CheckpointError> {
    // A thread sends nothing before all ranks have one, so that none waits for a rank without.
    let (begin, may_begin) = mpsc::channel::<()>();
    let folder = Arc::new(folder);
    let of_thread = folder.clone();
    let work = Background::start(WRITER, move |is_cancelled, progress| {
        if may_begin.recv().is_err() {
            let path = of_thread.path().to_path_buf();
            return Err(CheckpointError::Cancelled { path });
        }
        of_thread.replicate(sealed, progress, is_cancelled)
    });
    // If a rank has no thread, this drops `begin` first, which ends the thread that is joined then.
    let (begin, work) = settle(world, work.map(|work| (begin, work)))?;
    // The thread is there, because it waits for this.
    let _ = begin.send(());
    Ok(Stage::Replicate { work, folder })
}
