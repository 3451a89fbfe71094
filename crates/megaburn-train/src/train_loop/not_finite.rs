//! Steps whose loss or gradient is not finite.

use megaburn_report::metrics::StepMetrics;

use super::TrainLoop;
use crate::{error::TrainError, run_trainer::RunTrainer};

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// Computes a step again whose loss or gradient was not finite: nothing has changed, so it is
    /// finite if the hardware failed once. Other errors are returned.
    pub(super) fn compute_again(&mut self, error: TrainError) -> Result<StepMetrics, TrainError> {
        let TrainError::NonFinite {
            step,
            loss,
            grad_norm,
            ..
        } = error
        else {
            return Err(error);
        };
        if !self.config.train.rerun_non_finite {
            return Err(error);
        }
        let ranks = self.trainer.core_mut().ranks_of_non_finite_losses()?;
        let metrics = self.trainer.try_step()?;
        if let Some(report) = &mut self.report {
            report.computed_again(step, loss, grad_norm, &ranks);
        }
        Ok(StepMetrics {
            reruns: 1,
            ..metrics
        })
    }

    /// Records a non-finite step before its diagnosis, because the diagnosis may fail.
    pub(super) fn failed(&mut self, error: TrainError) -> TrainError {
        if let (
            TrainError::NonFinite {
                step,
                loss,
                grad_norm,
                ..
            },
            Some(report),
        ) = (&error, &mut self.report)
            && let Err(lost) = report.not_finite(*step, *loss, *grad_norm)
        {
            tracing::warn!("cannot record step {step}: {lost}");
        }
        self.trainer.diagnosed(error)
    }
}
