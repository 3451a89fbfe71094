//! The decoder's trainer in a run.

use megaburn_models::Decoder;
use megaburn_report::metrics::{EvalMetrics, StepMetrics};

use super::Trainer;
use crate::{
    error::TrainError,
    report::Reporter,
    resumed::Resumed,
    run_trainer::{RunTrainer, StopCheck},
    stored_checkpoints::StoredCheckpoints,
    trainer_core::{Record, TrainerCore},
};

impl RunTrainer for Trainer {
    type Model = Decoder;

    fn core(&self) -> &TrainerCore<Decoder> {
        &self.core
    }

    fn core_mut(&mut self) -> &mut TrainerCore<Decoder> {
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
        let sets = self.samples.valid.iter();
        sets.map(|set| set.name.as_deref()).collect()
    }

    fn tests(&self) -> bool {
        !self.samples.test.is_empty()
    }

    fn evaluate_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        self.evaluate_all(&self.samples.valid, stop)
    }

    fn test_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        self.evaluate_all(&self.samples.test, stop)
    }

    fn sample(&self) -> Result<Option<String>, TrainError> {
        self.generated_sample()
    }

    fn announce(&self, report: &mut Reporter<'_>) {
        let next = self.core.progress.step + 1;
        report.precision_change(
            &self.core.config,
            &self.model_config,
            &self.core.device,
            next,
        );
    }

    fn comment(&self, metrics: &StepMetrics, report: &mut Reporter<'_>) {
        report.precision(&self.core.config, metrics);
    }
}
