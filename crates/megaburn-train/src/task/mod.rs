//! Runs of any model: what a program says about its model and its data, and the trainer, the
//! checkpoints and the command line that it gets for that.
//!
//! A program implements [`TrainModel`] for its model and [`TrainTask`] for what builds the model and
//! reads the data. [`train_task()`] trains it.

mod config;
mod data;
mod error;
mod evaluate;
mod in_run;
mod layers;
mod model;
mod passes;
mod place;
mod resume;
mod run;
mod stage;
mod totals;
mod train_task;
mod trainer;

pub use config::TaskConfig;
pub use data::{BatchFn, MicroBatch, TaskData, TrainData};
pub use error::{TaskError, TaskRunError};
pub use layers::TaskLayers;
pub use model::{LossSum, StageOutput, TrainModel};
pub use place::ModelPlace;
pub use run::train_task;
pub use stage::{PipelineSplit, Stage};
pub use train_task::TrainTask;
pub use trainer::ModelTrainer;
