//! Reads, hashes and writes tensors at the same time.

use std::{
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, Scope, ScopedJoinHandle},
};

use burn::tensor::TensorData;

use super::{
    budget::Budget,
    data_file::DataFile,
    file_hasher::FileHasher,
    planned_tensor::{LoadedTensor, PlannedTensor, TensorPlan},
};
use crate::error::CheckpointError;

/// Tensors, in file order.
type Tensors<'a> = Receiver<Arc<LoadedTensor<'a>>>;

/// Writes tensors to `file` and hashes them, each on a thread of its own, while this thread reads
/// the next ones with `read`. The threads look at the same bytes, which are not copied, and end
/// with this function. Tensors that are in memory at once are within the budget.
///
/// # Errors
/// `read` fails, a weight is not finite, or the file cannot be written. If several fail, the error
/// of `read` is returned, otherwise the hasher's, otherwise the file's. After a failure, nothing more is read.
pub(super) fn run<'a, V>(
    tensors: Vec<PlannedTensor<V>>,
    read: impl Fn(V, &TensorPlan) -> Result<TensorData, CheckpointError>,
    budget: &Budget,
    hasher: FileHasher,
    file: DataFile<'a>,
) -> Result<(FileHasher, DataFile<'a>), CheckpointError> {
    thread::scope(|scope| {
        let (to_hasher, hashed) = mpsc::channel();
        let (to_file, written) = mpsc::channel();
        let hasher = Stage::start(scope, "checkpoint-hasher", move || {
            each(hasher, hashed, FileHasher::add)
        })?;
        let file = Stage::start(scope, "checkpoint-file", move || each(file, written, write))?;
        let read = read_all(tensors, read, budget, [to_hasher, to_file]);
        let (hasher, file) = (hasher.join(), file.join());
        read?;
        Ok((hasher?, file?))
    })
}

/// Reads the tensors and sends each to both stages. They end after that, because nothing more can
/// come.
fn read_all<'a, V>(
    tensors: Vec<PlannedTensor<V>>,
    read: impl Fn(V, &TensorPlan) -> Result<TensorData, CheckpointError>,
    budget: &'a Budget,
    stages: [Sender<Arc<LoadedTensor<'a>>>; 2],
) -> Result<(), CheckpointError> {
    for PlannedTensor { plan, values } in tensors {
        let memory = budget.reserve(plan.num_read_bytes());
        let data = read(values, &plan)?;
        let tensor = Arc::new(LoadedTensor::new(plan, data, memory)?);
        for stage in &stages {
            if stage.send(tensor.clone()).is_err() {
                // The stage has failed, and its thread returns the error.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// A thread of the pipeline.
struct Stage<'scope, T> {
    name: &'static str,
    thread: ScopedJoinHandle<'scope, Result<T, CheckpointError>>,
}

impl<'scope, T: Send + 'scope> Stage<'scope, T> {
    fn start(
        scope: &'scope Scope<'scope, '_>,
        name: &'static str,
        work: impl FnOnce() -> Result<T, CheckpointError> + Send + 'scope,
    ) -> Result<Self, CheckpointError> {
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn_scoped(scope, work)
            .map_err(|source| CheckpointError::NoThread { source })?;
        Ok(Self { name, thread })
    }

    /// Waits for the thread's result.
    fn join(self) -> Result<T, CheckpointError> {
        let thread = self.name;
        let panicked = |_| Err(CheckpointError::Panicked { thread });
        self.thread.join().unwrap_or_else(panicked)
    }
}

/// Does a stage's work on each tensor.
fn each<'a, T>(
    mut state: T,
    tensors: Tensors<'a>,
    work: impl Fn(&mut T, &LoadedTensor<'a>) -> Result<(), CheckpointError>,
) -> Result<T, CheckpointError> {
    for tensor in tensors {
        work(&mut state, &tensor)?;
    }
    Ok(state)
}

fn write(file: &mut DataFile<'_>, tensor: &LoadedTensor<'_>) -> Result<(), CheckpointError> {
    for written in &tensor.plan.pieces {
        tensor.for_each_run(written, |run| file.write(run))?;
    }
    Ok(())
}
