//! What a program trains.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};

use super::{
    data::TaskData, error::TaskError, model::TrainModel, place::ModelPlace, stage::PipelineSplit,
};

/// What a program trains: a model, built from a configuration of the program's own, and data.
///
/// `examples/own_model.rs` is a complete program.
pub trait TrainTask: Send + Sync {
    /// The program's own sections of a configuration file, with their defaults.
    type Config: Serialize + DeserializeOwned + Default + Clone + Debug + Send + Sync;

    /// The model.
    type Model: TrainModel;

    /// The name of the task. Without `run.dir`, `runs/NAME` is the folder of a run.
    fn name(&self) -> String;

    /// Builds this rank's part of the model. Weights must follow from the seed of the groups and the
    /// names of layers, as those of the parallel layers do, so that every layout begins alike.
    ///
    /// # Errors
    /// The layout does not split the model.
    fn model(
        &self,
        config: &Self::Config,
        place: &ModelPlace<'_>,
    ) -> Result<Self::Model, TaskError>;

    /// Opens the data, once in each process.
    ///
    /// # Errors
    /// The data cannot be read.
    fn data(
        &self,
        config: &Self::Config,
    ) -> Result<TaskData<<Self::Model as TrainModel>::Batch>, TaskError>;

    /// How a pipeline splits the model, for micro-batches of `micro_batch` samples. `None` refuses
    /// `parallel.pp` above 1.
    fn pipeline(&self, config: &Self::Config, micro_batch: usize) -> Option<PipelineSplit> {
        let _ = (config, micro_batch);
        None
    }
}
