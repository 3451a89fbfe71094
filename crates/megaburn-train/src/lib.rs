//! Configuration, trainer, training loop and resilience.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod assets;
mod attention_line;
pub mod config;
mod data;
pub mod device;
mod diagnosis;
mod dry_run;
mod error;
pub mod estimate;
mod eval;
mod exit;
pub mod failure;
mod fresh;
mod gpu_health;
pub mod hang;
mod in_place;
mod last_words;
pub mod megatron;
pub mod memory;
mod mfu;
mod monitor;
mod part;
mod pipeline;
mod precision_line;
mod profile;
mod rank_run;
mod ranks;
mod report;
mod reshard;
mod resume_error;
mod resumed;
mod run;
mod run_folder;
mod run_trainer;
mod saves;
pub mod signal;
mod start;
mod state;
mod state_name;
mod stop;
mod stored_checkpoints;
mod stragglers;
mod task;
pub mod text;
pub mod time;
mod train_loop;
mod train_state;
mod trainer;
mod trainer_core;

pub use config::{ConfigLayers, TrainConfig};
pub use data::{DefaultText, RunData};
pub use diagnosis::{Diagnosis, NonFiniteOrigin};
pub use dry_run::dry_run;
pub use error::TrainError;
pub use eval::{SetLoss, eval_layers, evaluate};
pub use exit::Exit;
pub use fresh::starts_anew;
pub use pipeline::Pipeline;
pub use ranks::run_ranks;
pub use reshard::reshard;
pub use resume_error::{RecordedInit, ResumeError};
pub use resumed::Resumed;
pub use run::pretrain;
pub use run_folder::{IdleRun, RunFolderError, RunInfo, RunPaths};
pub use start::report_start_failure;
pub use state_name::{StateKind, StateName};
pub use stop::StopReason;
pub use task::{
    BatchFn, LossSum, MicroBatch, ModelPlace, ModelTrainer, PipelineSplit, Stage, StageOutput,
    TaskConfig, TaskData, TaskError, TaskLayers, TaskRunError, TrainData, TrainModel, TrainTask,
    train_task,
};
pub use train_loop::Ended;
pub use train_state::{TrainState, TrainStateConfig};
pub use trainer::{Conversions, LossScaleConversion, ResumedAmaxes, Trainer};
pub use trainer_core::Progress;
