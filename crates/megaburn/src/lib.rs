//! Megatron-LM's training system for Burn.
//!
//! This facade re-exports the crates under one name. [`prelude`] contains the items that an
//! application needs to parallelize its own modules.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// The print macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub use megaburn_autograd as autograd;
pub use megaburn_checkpoint as checkpoint;
pub use megaburn_collective as collective;
#[cfg(feature = "cuda")]
pub use megaburn_cuda as cuda;
pub use megaburn_data as data;
pub use megaburn_doctor as doctor;
pub use megaburn_kernels as kernels;
pub use megaburn_launch as launch;
#[cfg(feature = "learner")]
pub use megaburn_learner as learner;
pub use megaburn_mesh as mesh;
pub use megaburn_models as models;
pub use megaburn_optim as optim;
pub use megaburn_parallel as parallel;
pub use megaburn_pipeline as pipeline;
pub use megaburn_plan as plan;
#[cfg(feature = "records")]
pub use megaburn_records as records;
pub use megaburn_report as report;
pub use megaburn_store as store;
pub use megaburn_torch as torch;
pub use megaburn_train as train;
pub use megaburn_verify as verify;
pub use megaburn_watch as watch;

pub mod cli;

/// The items with which a crate defines a model family of its own; see
/// [`ModelFamily`](family::ModelFamily).
pub mod family {
    pub use megaburn_models::{
        DecoderConfig, Family, ModelError,
        decoder::{
            BlockOrder, Experts, FamilyHead, HeadInit, HeadParts, LossInput, Mla, Multipliers,
            NormPlacement, OutputHead, Positions, Rotary, TokenLosses,
        },
        families::{
            HfJson, KeyDefault, LLAMA_DEFAULTS, LLAMA_KEYS, Meaning, ModelFamily, read_plain_sizes,
            write_llama_sizes, write_rotary_percent,
        },
        hf::Key,
    };
    pub use megaburn_parallel::{
        Activation, Norm, NormKind, ParallelError, PlanBuilder, QkNormKind, ReplicatedLinear,
        Sharded, VocabParallelBias, VocabParallelEmbedding,
    };
    pub use serde_json::Value;
}

/// The items with which a program trains a model of its own; see
/// [`TrainTask`](task::TrainTask) and [`cli::train()`].
pub mod task {
    pub use megaburn_parallel::Sharded;
    pub use megaburn_train::{
        BatchFn, LossSum, MicroBatch, ModelPlace, ModelTrainer, PipelineSplit, Stage, StageOutput,
        TaskConfig, TaskData, TaskError, TaskLayers, TaskRunError, TrainData, TrainModel,
        TrainTask, train_task,
    };
}

/// The items that an application needs to parallelize its own modules.
pub mod prelude {
    pub use megaburn_collective::{Group, GroupOptions, ProcessGroups, ReduceOp, run_threads};
    pub use megaburn_mesh::{Axis, Layout, Mesh, ShardPlan, ShardSpec};
    pub use megaburn_optim::ShardedOptimizer;
    pub use megaburn_parallel::{
        ParallelError, ParallelLinear, ParallelLinearConfig, ParallelPlan, Sharded, ShardedLora,
        VocabParallelBias, VocabParallelEmbedding, VocabParallelEmbeddingConfig, parallelize,
    };
    #[cfg(feature = "records")]
    pub use megaburn_records::RecordFile;
}
