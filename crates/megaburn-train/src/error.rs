mod kind;

use std::{io, path::PathBuf};

use megaburn_checkpoint::CheckpointError;
use megaburn_collective::CollectiveError;
use megaburn_data::DataError;
use megaburn_mesh::MeshError;
use megaburn_models::ModelError;
use megaburn_optim::OptimError;
use megaburn_pipeline::PipelineError;
use megaburn_report::ReportError;
use thiserror::Error;

use crate::{
    diagnosis::Diagnosis, megatron::MegatronError, resume_error::ResumeError,
    run_folder::RunFolderError, state_name::StateName, task::TaskRunError,
};

/// Why a run cannot start or continue.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum TrainError {
    #[error("unknown key `{key}` in {origin}; {}", match nearest {
        Some(nearest) => format!("the nearest key is `{nearest}`"),
        None => "there is no similar key; configs/llama-tiny.toml lists all keys".into(),
    })]
    UnknownKey {
        key: String,
        origin: String,
        nearest: Option<String>,
    },
    #[error(transparent)]
    Task(#[from] TaskRunError),
    #[error("`{key}` in {origin} is no longer supported: {why}; remove it")]
    RemovedKey {
        key: String,
        origin: String,
        why: &'static str,
    },
    #[error("`{key}` in {origin}: expected {expected}, found {found}")]
    WrongType {
        key: String,
        origin: String,
        expected: &'static str,
        found: String,
    },
    #[error("{place}: {why}")]
    Value { place: String, why: String },
    #[error("cannot read {origin}: {}", source.to_string().trim_end())]
    Toml {
        origin: String,
        source: toml::de::Error,
    },
    #[error("`--set {text}` is not KEY=VALUE, with a key like `parallel.tp`")]
    Set { text: String },
    #[error("`{key}` is {value}: it must be {rule}")]
    Invalid {
        key: &'static str,
        value: String,
        rule: String,
    },
    #[error(
        "`model.{key}` is set to {value}, but `{init}`, which the run starts from, has {found}: \
        the model is taken from there, so remove `[model]` from files and flags"
    )]
    OtherThanInit {
        key: String,
        value: String,
        init: String,
        found: String,
    },
    #[error(transparent)]
    Layout(#[from] MeshError),
    #[error(
        "{source}; no launcher sets the number of ranks, so it is `parallel.ranks` = {ranks}: \
        change it, or set `parallel.dp`"
    )]
    Ranks { ranks: usize, source: MeshError },
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("cannot install the handlers of signals that stop a run: {source}")]
    Signals { source: io::Error },
    #[error(
        "step {step} is not finite (loss {loss}, gradient norm {grad_norm}{diagnosis}); the weights are those of step {}",
        step.saturating_sub(1)
    )]
    NonFinite {
        step: u64,
        loss: f64,
        grad_norm: f64,
        diagnosis: Diagnosis,
    },
    #[error(
        "the loss of step {step} is {loss:.4}, a spike (above {bound:.4}, `train.spike_factor` times the \
        mean of the 16 updates before); the weights are those of step {}: look at its samples, and \
        continue with train.on_spike = \"skip\" or \"none\"",
        step.saturating_sub(1)
    )]
    LossSpike { step: u64, loss: f64, bound: f64 },
    #[error(
        "the loss of step {step} is {loss:.4}, a spike (above {bound:.4}), after which \
        train.on_spike = \"rollback\" cannot continue: {why}"
    )]
    NoRollback {
        step: u64,
        loss: f64,
        bound: f64,
        why: String,
    },
    #[error(
        "after step {step} `{param}` is not finite on rank {rank}: the update overflowed, or the \
        hardware failed; it was not saved; resume from the last checkpoint, or start again \
        without one, with a smaller optimizer.lr"
    )]
    NonFiniteWeights {
        step: u64,
        param: String,
        rank: usize,
    },
    #[error(
        "after step {step} ranks {} and {} have different copies of {tensor}: the memory or the \
        hardware of {} failed, or they run different builds; resume from a checkpoint",
        ranks[0], ranks[1],
        match is_second_wrong {
            true => format!("rank {}, which differs from most copies,", ranks[1]),
            false => "one of them".to_string(),
        }
    )]
    ReplicasDiffer {
        step: u64,
        tensor: StateName,
        ranks: [usize; 2],
        is_second_wrong: bool,
        /// Whether this process has the copy that is known to be wrong.
        is_own: bool,
    },
    #[error(
        "on rank {rank} {tensor} is not what step {} left, found at the update of step {step}: the \
        memory of rank {rank} failed; resume the run without that GPU or host",
        step.saturating_sub(1)
    )]
    StateChanged {
        step: u64,
        rank: usize,
        tensor: StateName,
        /// Whether it is the state of this process.
        is_own: bool,
    },
    #[error(
        "step {step} is the last of {skips} skipped steps in a row (loss {loss}, gradient norm \
        {grad_norm}, loss scale {loss_scale}{diagnosis}); resume from a checkpoint with a \
        smaller optimizer.lr, a larger optimizer.grad_norm_skip_threshold or train.dtype=bf16"
    )]
    TooManySkippedSteps {
        step: u64,
        skips: u64,
        loss: f64,
        grad_norm: f64,
        loss_scale: f64,
        diagnosis: Diagnosis,
    },
    #[error(
        "rank {rank} accepted step {step}, but another rank did not: the memory or the hardware \
        of one of them failed; resume from a checkpoint"
    )]
    Disagrees { step: u64, rank: usize },
    #[error(transparent)]
    RunFolder(#[from] RunFolderError),
    #[error("--ranks {ranks} is given, but a launcher started {world_size} ranks: remove the flag")]
    RanksUnderLauncher { ranks: usize, world_size: usize },
    #[error(
        "the run must also fit a world size of {ranks}, with which `megaburn launch --min-nnodes` may \
        restart it, but there: {why}. Leave the data-parallel size of the layout open, set \
        train.pad_batch=true for a batch that these ranks cannot split, or raise `--min-nnodes`"
    )]
    NotOnFewerRanks { ranks: usize, why: Box<TrainError> },
    #[error(
        "layout `{layout}` needs {ranks} GPUs, one per rank, but this host has {gpus} (see \
        CUDA_VISIBLE_DEVICES): choose a smaller layout, --device cpu, or, to test the layout, \
        `megaburn launch --nproc {ranks} --ranks-per-gpu {}`",
        ranks.div_ceil((*gpus).max(1))
    )]
    TooFewGpus {
        layout: String,
        ranks: usize,
        gpus: usize,
    },
    #[error(
        "the GPU that this rank was to share does not exist: start fewer ranks, or more per GPU \
        with `megaburn launch --ranks-per-gpu`; on a machine without GPUs remove that flag"
    )]
    NoGpuToShare,
    #[error(
        "local rank {local_rank} has no GPU of its own: {ranks} ranks were started on this host, \
        which has {gpus} GPUs (see CUDA_VISIBLE_DEVICES); to share GPUs for a test, use \
        `megaburn launch --ranks-per-gpu {}`",
        ranks.div_ceil((*gpus).max(1))
    )]
    NoGpuForRank {
        local_rank: usize,
        ranks: usize,
        gpus: usize,
    },
    #[error(
        "layout `{layout}` needs {ranks} GPUs, and each needs its own process: start them with \
        `megaburn launch --nproc {ranks}` or another launcher"
    )]
    GpuThreads { layout: String, ranks: usize },
    #[error("cannot compute on GPUs: {why}")]
    Cuda { why: String },
    #[error("cannot start the ranks: {why}")]
    Launch { why: String },
    #[error("rank {rank} was started with a different configuration, layout or data from rank 0")]
    OtherConfig { rank: usize },
    #[error(transparent)]
    Resume(#[from] ResumeError),
    #[error(
        "out of GPU memory: cannot allocate {:.2} GiB; {memory}; choose a smaller \
        train.micro_batch or data.seq_len, or a larger parallel.tp",
        *bytes as f64 / f64::from(1 << 30)
    )]
    OutOfMemory { bytes: u64, memory: String },
    #[error("the GPU failed: {why}")]
    Device { why: String },
    #[error(
        "cannot start a thread: {why}; raise the limit on processes and threads (`ulimit -u`, a \
        container's pids limit), or set RAYON_NUM_THREADS to fewer"
    )]
    NoThread { why: String },
    #[error("rank {rank} panicked: {message}")]
    RankPanicked { rank: usize, message: String },
    #[error("{0}{keys}", keys = keys_of(.0))]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Collective(Box<CollectiveError>),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Optim(#[from] OptimError),
    #[error(transparent)]
    Megatron(#[from] MegatronError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("cannot save step {step}: {source}")]
    Save {
        step: u64,
        source: Box<CheckpointError>,
    },
    #[error(
        "the checkpoint of step {step} was not uploaded to `{url}`: {source}; it is in run.dir, and \
        the next start uploads it"
    )]
    Upload {
        step: u64,
        url: String,
        source: Box<CheckpointError>,
    },
    #[error("`train.checkpoint_store` is `{url}`, which holds checkpoints of run {found}, {why}")]
    StoredRun {
        url: String,
        found: String,
        why: String,
    },
}

impl From<CollectiveError> for TrainError {
    fn from(error: CollectiveError) -> Self {
        Self::Collective(Box::new(error))
    }
}

/// The keys that an error of a pipeline is about, to be appended to its message.
fn keys_of(error: &PipelineError) -> &'static str {
    match error {
        PipelineError::FewLayers {
            first: None,
            last: None,
            ..
        } => " (`model.layers`; pp of `--layout`, `parallel.pp`; `parallel.chunks`)",
        PipelineError::FewLayers { .. } => {
            " (`parallel.first_stage_layers`, `parallel.last_stage_layers`; `model.layers`; pp of `--layout`, `parallel.pp`; `parallel.chunks`)"
        }
        PipelineError::Chunks { .. } => " (`parallel.schedule`, `parallel.chunks`)",
        PipelineError::NoGroups { .. } => " (`parallel.micro_batch_group`, `parallel.schedule`)",
        PipelineError::GroupTooSmall { .. } => " (`parallel.micro_batch_group`)",
        PipelineError::GroupTooLarge { .. } | PipelineError::Rest { .. } => {
            " (`parallel.micro_batch_group`; `train.global_batch`, `train.micro_batch`)"
        }
        PipelineError::TooLarge { .. } => {
            " (pp of `--layout`, `parallel.chunks`; `train.global_batch`, `train.micro_batch`)"
        }
        PipelineError::LayoutText { .. } => " (`parallel.pipeline_layout`)",
        PipelineError::TwoSplits => {
            " (`parallel.pipeline_layout`; `parallel.first_stage_layers`, `parallel.last_stage_layers`, `parallel.count_embedding`, `parallel.count_loss`)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests;
