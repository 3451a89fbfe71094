//! What a run needs of a trainer, whatever it trains.

use burn::module::Module;
use megaburn_report::metrics::{EvalMetrics, StepMetrics};

use crate::{
    error::TrainError,
    report::Reporter,
    resumed::Resumed,
    stored_checkpoints::StoredCheckpoints,
    trainer_core::{Record, TrainerCore},
};

/// Whether the run stops, the same on all ranks.
pub(crate) type StopCheck<'a> = dyn FnMut() -> Result<bool, TrainError> + 'a;

/// The trainer of one rank, which the training loop drives.
pub(crate) trait RunTrainer {
    /// The model that it trains.
    type Model: Module;

    fn core(&self) -> &TrainerCore<Self::Model>;

    fn core_mut(&mut self) -> &mut TrainerCore<Self::Model>;

    /// What a checkpoint records in addition to tensors.
    fn record(&self) -> Record;

    /// Resumes from the newest intact checkpoint of the run, if there is one.
    ///
    /// # Errors
    /// The checkpoint cannot be continued; the error says why.
    /// # Collective
    /// All ranks.
    fn resume_with(&mut self, stored: &StoredCheckpoints) -> Result<Option<Resumed>, TrainError>;

    /// One optimizer step, without the diagnosis of one that is not finite.
    ///
    /// # Errors
    /// A step that is not finite, a failed collective or device.
    /// # Collective
    /// All ranks.
    fn try_step(&mut self) -> Result<StepMetrics, TrainError>;

    /// Adds the diagnosis to the error of a step that is not finite.
    ///
    /// # Collective
    /// All ranks.
    fn diagnosed(&mut self, error: TrainError) -> TrainError;

    /// The names of the evaluations on validation data; none without such data.
    fn valid_names(&self) -> Vec<Option<&str>>;

    /// Whether there is data to test on at the end of the run.
    fn tests(&self) -> bool;

    /// The losses on all sets of validation data; `None` if `stop` returned true in between.
    ///
    /// # Errors
    /// A failed collective or device, and the errors of `stop`.
    /// # Collective
    /// All ranks.
    fn evaluate_unless(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError>;

    /// As [`evaluate_unless`](Self::evaluate_unless), on the test data.
    ///
    /// # Errors
    /// As [`evaluate_unless`](Self::evaluate_unless).
    /// # Collective
    /// All ranks.
    fn test_unless(&self, stop: &mut StopCheck<'_>)
    -> Result<Option<Vec<EvalMetrics>>, TrainError>;

    /// What the trained model generates, if the run asks for it.
    ///
    /// # Errors
    /// The model cannot generate it.
    /// # Collective
    /// All ranks.
    fn sample(&self) -> Result<Option<String>, TrainError>;

    /// Reports what changes with the next step. The start has described its first one.
    fn announce(&self, report: &mut Reporter<'_>);

    /// Reports what is particular to this trainer after a step.
    fn comment(&self, metrics: &StepMetrics, report: &mut Reporter<'_>);

    /// Whether there is data to evaluate on.
    fn evaluates(&self) -> bool {
        !self.valid_names().is_empty()
    }

    /// Adds the losses of evaluations on the first validation set, which decide which checkpoints
    /// are the best.
    fn add_eval_losses(&mut self, evals: Vec<EvalMetrics>) {
        let names = self.valid_names();
        let Some(first) = names.first() else { return };
        let first = first.map(str::to_string);
        self.core_mut().add_eval_losses(first.as_deref(), evals);
    }
}
