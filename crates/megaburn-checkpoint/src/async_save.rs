//! Saves a checkpoint while the program keeps computing.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use megaburn_collective::{Phase, ProcessGroups, Progress, objects};

use crate::{
    agree::settle,
    checkpoint::Checkpoint,
    error::CheckpointError,
    latest::{judge_together, verify_share},
    named_tensor::{NamedTensor, PendingValues},
    report::Report,
    retention::{Retention, retain, to_verify},
    save::{Guard, UnfinishedCheckpoint, warn_of_retention},
    share::Share,
    snapshot::Snapshot,
    verified::remember,
};

/// A checkpoint that a thread of each rank is writing.
///
/// ```text
/// begin       values start to be copied to the host    all ranks
///             each rank's thread writes its file       steps continue
/// is_written  have all threads ended?                  all ranks, after a step
/// commit      manifest, final name, deletions          all ranks
/// ```
///
/// Until the commit, the folder has a temporary name, so a kill leaves the older checkpoints. If it
/// is dropped before the commit, the thread stops after the tensor that it is writing, and rank 0
/// removes the folder.
///
/// Memory: the values that this rank writes, once, until each is written; and one tensor a second
/// time.
#[derive(Debug)]
pub struct AsyncSave {
    // Dropped first, so that the thread has ended when the folder is removed.
    writer: Writer,
    folder: UnfinishedCheckpoint,
    dir: PathBuf,
    snapshot: Snapshot,
    retention: Retention,
}

/// The thread that writes a rank's share.
#[derive(Debug)]
struct Writer {
    is_cancelled: Arc<AtomicBool>,
    thread: Option<JoinHandle<Written>>,
}

/// What the thread did.
struct Written {
    report: Result<Report, CheckpointError>,
    /// Older checkpoints of which this rank verified its share of the files.
    verified: Vec<(PathBuf, Result<Checkpoint, CheckpointError>)>,
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
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
        snapshot: Snapshot,
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        let world = &groups.world;
        let _phase = world.phase(Phase::Save);
        let folder = UnfinishedCheckpoint::create(dir, guard, groups, snapshot.step)?;
        // Reading old checkpoints takes as long as writing one, so the threads do it too.
        let run_id = snapshot.run_id.as_deref();
        let old = to_verify(world, dir, run_id, snapshot.step, retention)?;
        let share = Share::new(tensors, groups).and_then(Share::copied);
        let share = settle(world, share)?;
        let (rank, num_ranks) = (world.rank(), world.size());
        let path = folder.path.clone();
        let writer = Writer::start(move |is_cancelled| {
            let none = Progress::none();
            let read = |values: PendingValues, _| values();
            let report = share.write(&path, rank, read, &none, is_cancelled);
            let verify = |path: PathBuf| {
                let found = verify_share(&path, rank, num_ranks, &none);
                (path, found)
            };
            let verified = old.into_iter().map(verify).collect();
            Written { report, verified }
        });
        Ok(Self {
            writer: settle(world, writer)?,
            folder,
            dir: dir.to_path_buf(),
            snapshot,
            retention: retention.clone(),
        })
    }

    /// The step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.snapshot.step
    }

    /// Whether the threads of all ranks have ended, so that a commit does not wait.
    ///
    /// # Errors
    /// A rank is gone.
    /// # Collective
    /// All ranks of `groups.world`; one bit.
    pub fn is_written(&self, groups: &ProcessGroups) -> Result<bool, CheckpointError> {
        let world = &groups.world;
        let all: Vec<bool> = objects::gather(world, &self.writer.is_done())?;
        Ok(objects::broadcast(
            world,
            &all.into_iter().all(|done| done),
        )?)
    }

    /// Waits for the threads of all ranks and completes the checkpoint. Then the checkpoints that
    /// `retention` does not keep are deleted.
    ///
    /// # Errors
    /// Any rank's failure or the guard's refusal, on every rank. The older checkpoints are then
    /// unchanged, and nothing of the new one remains.
    /// # Collective
    /// All ranks of `groups.world`; a few messages, none with tensors.
    pub fn commit(
        self,
        guard: Option<Guard<'_>>,
        groups: &ProcessGroups,
    ) -> Result<PathBuf, CheckpointError> {
        let Self {
            folder,
            dir,
            snapshot,
            retention,
            writer,
        } = self;
        let world = &groups.world;
        let phase = world.phase(Phase::Save);
        let Written { report, verified } = writer.wait();
        let path = folder.commit(guard, groups, &snapshot, report)?;
        for (path, mine) in verified {
            let judged = judge_together(world, &path, mine)?;
            remember(&path, judged.is_ok());
        }
        let (run_id, step) = (snapshot.run_id.as_deref(), snapshot.step);
        let retained = retain(world, &dir, run_id, step, &retention, phase.progress());
        warn_of_retention(groups, retained);
        Ok(path)
    }
}

impl Writer {
    fn start(
        write: impl FnOnce(&AtomicBool) -> Written + Send + 'static,
    ) -> Result<Self, CheckpointError> {
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let flag = is_cancelled.clone();
        let thread = thread::Builder::new()
            .name("checkpoint-writer".into())
            .spawn(move || write(&flag));
        let thread = thread.map_err(|source| CheckpointError::NoThread { source })?;
        Ok(Self {
            is_cancelled,
            thread: Some(thread),
        })
    }

    fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn wait(mut self) -> Written {
        let ended = self.thread.take().map(JoinHandle::join);
        match ended {
            Some(Ok(written)) => written,
            // The panic's message was printed by the thread.
            _ => Written {
                report: Err(CheckpointError::WriterPanicked),
                verified: Vec::new(),
            },
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its result is of no use any more.
            let _ = thread.join();
        }
    }
}
