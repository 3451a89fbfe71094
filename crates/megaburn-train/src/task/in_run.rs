//! The trainer of a task in a run.

use megaburn_report::metrics::{EvalMetrics, StepMetrics};

use super::{train_task::TrainTask, trainer::ModelTrainer};
use crate::{
    error::TrainError,
    report::Reporter,
    resumed::Resumed,
    run_trainer::{RunTrainer, StopCheck},
    stored_checkpoints::StoredCheckpoints,
    trainer_core::{Record, TrainerCore},
};

impl<T: TrainTask> RunTrainer for ModelTrainer<T> {
    type Model = T::Model;

    fn core(&self) -> &TrainerCore<T::Model> {
        &self.core
    }

    fn core_mut(&mut self) -> &mut TrainerCore<T::Model> {
        &mut self.core
    }

    fn record(&self) -> Record {
        self.checkpoint_record()
    }

    fn resume_with(&mut self, stored: &StoredCheckpoints) -> Result<Option<Resumed>, TrainError> {
        self.resume_from(stored)
    }

    fn try_step(&mut self) -> Result<StepMetrics, TrainError> {
        self.undiagnosed_step()
    }

    fn diagnosed(&mut self, error: TrainError) -> TrainError {
        self.with_origin(error)
    }

    fn valid_names(&self) -> Vec<Option<&str>> {
        self.data.valid.iter().map(|_| None).collect()
    }

    fn tests(&self) -> bool {
        false
    }

    fn evaluate_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        if self.data.valid.is_none() {
            return Ok(Some(Vec::new()));
        }
        Ok(self.evaluation(stop)?.map(|eval| vec![eval]))
    }

    fn test_unless(&self, _: &mut StopCheck<'_>) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        Ok(Some(Vec::new()))
    }

    fn sample(&self) -> Result<Option<String>, TrainError> {
        Ok(None)
    }

    fn announce(&self, _: &mut Reporter<'_>) {}

    fn comment(&self, _: &StepMetrics, _: &mut Reporter<'_>) {}
}
