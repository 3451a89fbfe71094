use std::path::PathBuf;

use burn::store::RecordError;
use megaburn_checkpoint::CheckpointError;
use megaburn_collective::CollectiveError;
use megaburn_optim::OptimError;
use megaburn_parallel::ParallelError;
use thiserror::Error;

/// Why a training could not start or continue.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum LearnerError {
    #[error(
        "layout `{layout}`: a Learner trains with the axes tp and dp, but {axis} is {degree}; use \
        `megaburn::train`, or a layout without {axis}"
    )]
    Axis {
        layout: String,
        axis: &'static str,
        degree: usize,
    },
    #[error(
        "the optimizer clips gradients, but it sees one rank's shards; remove its \
        `with_grad_clipping` and call `ParallelTraining::with_max_grad_norm`, which clips by the norm \
        of the full gradient, or pass `launch` a `ShardedOptimizer` with `with_grad_clipping` itself, not \
        the optimizer that its `init` returns"
    )]
    Clipping,
    #[error(
        "the optimizer reads full parameters (as LAMB, Muon and Adafactor do), but it would see one \
        rank's shards; pass `launch` a `ShardedOptimizer` itself, not the optimizer that its `init` returns"
    )]
    ReadsFullParameters,
    #[error(
        "parameter `{path}` does not hold floats; make it a constant tensor, because a training on \
        several ranks neither sends nor saves it"
    )]
    NotFloat { path: String },
    #[error("max_grad_norm is {0}; it must be positive")]
    MaxGradNorm(f64),
    #[error(
        "the training has Burn's checkpointers, which would save one rank's shards as if they were \
        the model; remove them and call `ParallelTraining::with_checkpoints`"
    )]
    BurnCheckpointers,
    #[error(
        "`checkpoint({epoch})` resumes from a checkpoint, but no folder is set; call \
        `ParallelTraining::with_checkpoints`"
    )]
    NoFolder { epoch: usize },
    #[error(
        "{} already has checkpoints, the newest of epoch {epoch}; resume with \
        `SupervisedTraining::checkpoint({epoch})` or use another folder", .folder.display()
    )]
    OtherRun { folder: PathBuf, epoch: u64 },
    #[error(
        "the {split} data has {items} items, but there are {ranks} data-parallel ranks; each needs \
        at least one"
    )]
    FewItems {
        split: &'static str,
        items: usize,
        ranks: usize,
    },
    #[error(
        "step {step}: ranks {a} and {b} split the same matrices, but one read a batch of {items_a} \
        items and the other of {items_b}; give the data loader the same seed, batch size and data on \
        every rank"
    )]
    DifferentBatches {
        step: usize,
        a: usize,
        b: usize,
        items_a: u64,
        items_b: u64,
    },
    #[error(
        "step {step}: ranks {a} and {b} split the same matrices, but the losses of their batches \
        are {loss_a} and {loss_b}; they read different items, or drop different elements. Build the \
        data loader on every rank with the same seed and one worker, and drop elements with \
        `ParallelDropout`"
    )]
    DifferentLosses {
        step: usize,
        a: usize,
        b: usize,
        loss_a: f64,
        loss_b: f64,
    },
    #[error("{0}; a layout is given as `--layout tp2-dp2`")]
    Layout(String),
    #[error("rank {rank} {why}")]
    Rank { rank: usize, why: String },
    #[error(
        "optimizer state `{field}` of parameter `{path}` has shape {shape:?}, but the parameter has \
        {param:?} on this rank; such state cannot be saved from shards. Use an optimizer whose state \
        has the shape of the parameter"
    )]
    OptimizerState {
        path: String,
        field: String,
        shape: Vec<usize>,
        param: Vec<usize>,
    },
    #[error(
        "{} has parameter `{name}`, which the model does not have; it was saved from another model",
        .path.display()
    )]
    OtherModel { path: PathBuf, name: String },
    #[error(
        "{} was saved by another program: it has no learner state", .path.display()
    )]
    NotOfLearner { path: PathBuf },
    #[error("{0}")]
    Record(String),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Optim(#[from] OptimError),
    #[error(transparent)]
    Parallel(#[from] ParallelError),
}

impl From<RecordError> for LearnerError {
    fn from(error: RecordError) -> Self {
        Self::Record(error.to_string())
    }
}

impl LearnerError {
    /// The failed collective that it is about, if it is about one.
    pub fn collective(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error)
            | Self::Checkpoint(CheckpointError::Collective(error))
            | Self::Optim(OptimError::Collective(error))
            | Self::Parallel(ParallelError::Collective(error)) => Some(error),
            _ => None,
        }
    }
}
