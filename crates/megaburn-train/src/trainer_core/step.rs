//! What ends a step: reduced gradients, the update, and the agreement of the ranks on its outcome.

use std::time::Duration;

use burn::{module::Module, tensor::Gradients};
use megaburn_optim::{DeviceScalar, GradNorm, LossScaler, OptimError};

use super::{Spike, TrainerCore, reduced::world_max, schedules::StepRates};
use crate::{
    config::{OnSpike, OptimizerConfig},
    diagnosis::Diagnosis,
    error::TrainError,
    failure::device_error,
    memory::used_bytes,
};

/// Give up after this many consecutive skipped steps, not counting loss-scale back-offs.
const MAX_CONSECUTIVE_SKIPS: u64 = 100;

/// The outcome of a step, the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// The mean loss.
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) is_update: bool,
    /// Whether the update was left out because the loss is a spike.
    is_spike: bool,
}

impl Outcome {
    fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

/// What ranks have found at the end of a step, or all of them together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    /// The time of the slowest rank.
    pub(crate) seconds: f64,
    /// The largest memory of a rank, in bytes.
    pub(crate) memory: f64,
    /// The loss, the largest one if ranks have different last bits; `None` if it, or the gradient
    /// norm, is not finite.
    pub(crate) loss: Option<f64>,
}

impl<M: Module> TrainerCore<M> {
    /// Adds the gradients of a micro-batch.
    pub(crate) fn accumulate(&mut self, grads: &mut Gradients) {
        let model = self
            .model
            .as_ref()
            .expect("the model is absent only during an update");
        self.grads.accumulate(model, grads);
    }

    /// Sums the gradients over the ranks that share parameters.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// The data-parallel ranks, and the stages that share a parameter.
    pub(crate) fn reduce_grads(&mut self) -> Result<(), TrainError> {
        self.grads.reduce()?;
        self.pipeline.all_reduce_tied(&mut self.grads)
    }

    /// The rates of the next update, which has a batch of `samples` samples.
    pub(crate) fn next_rates(&self, samples: u64) -> StepRates {
        let trained = self.progress.consumed_samples - self.progress.skipped_samples;
        self.schedules.rates(trained, samples)
    }

    /// Number of zeros in the gradients, if the run logs it.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks, if `train.log_num_zeros` is set.
    pub(crate) fn num_zeros(&mut self) -> Result<Option<DeviceScalar>, TrainError> {
        let logs = self.config.train.log_num_zeros;
        Ok(logs.then(|| self.grads.num_zeros()).transpose()?)
    }

    /// Norm of the parameters, if the run logs it.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks, if `train.log_params_norm` is set.
    pub(crate) fn params_norm(&mut self) -> Result<Option<GradNorm>, TrainError> {
        let logs = self.config.train.log_params_norm;
        Ok(logs
            .then(|| self.grads.params_norm(self.model()))
            .transpose()?)
    }

    /// Clips the gradients, and marks the step as skipped if their norm is too large.
    pub(crate) fn clip(&mut self, norm: &GradNorm) {
        let OptimizerConfig {
            clip_grad,
            grad_norm_skip_threshold,
            ..
        } = self.config.optimizer;
        self.grads.clip(norm, limit(clip_grad));
        if grad_norm_skip_threshold > 0.0 {
            self.grads.skip_above(norm, grad_norm_skip_threshold);
        }
    }

    /// Updates the weights, after a comparison of this rank's state if one is due.
    ///
    /// # Errors
    /// A failed collective or device.
    /// # Collective
    /// The ranks that share optimizer state.
    pub(crate) fn update_weights(&mut self, rates: &StepRates) -> Result<(), TrainError> {
        self.find_changed()?;
        let model = self.take_model();
        self.model = Some(
            self.optimizer
                .step_with(|path| rates.of(path), model, &self.grads)?,
        );
        Ok(())
    }

    /// Reads the outcome of the step from the device, which may have left out the update. `count` is
    /// what the sum of losses is divided by.
    ///
    /// # Errors
    /// A device that failed.
    pub(crate) fn read_outcome(
        &mut self,
        loss: &DeviceScalar,
        norm: &GradNorm,
        count: f64,
    ) -> Result<Outcome, TrainError> {
        let wait = self.part("wait");
        let outcome = self.outcome(loss, norm, count);
        drop(wait);
        if !outcome.as_ref().is_ok_and(|outcome| outcome.is_update) {
            // The update detected this on the device and changed nothing.
            self.optimizer.revert_step_count();
        }
        outcome
    }

    fn outcome(
        &self,
        loss: &DeviceScalar,
        norm: &GradNorm,
        count: f64,
    ) -> Result<Outcome, TrainError> {
        let sum = self.device_error(loss.read())?;
        let loss = sum / count.max(1.0);
        let threshold = limit(self.config.optimizer.grad_norm_skip_threshold);
        let (grad_norm, is_above) = self.device_error(norm.read_against(threshold))?;
        if self.groups.world.is_rehearsal() {
            // The numbers of a rank without the others mean nothing.
            return Ok(Outcome {
                loss: 0.0,
                grad_norm: 0.0,
                is_update: true,
                is_spike: false,
            });
        }
        let outcome = Outcome {
            loss,
            grad_norm,
            is_update: !is_above,
            is_spike: self.is_spike(sum, count),
        };
        Ok(Outcome {
            is_update: !is_above && !outcome.is_spike && outcome.is_finite(),
            ..outcome
        })
    }

    /// Checks that all ranks have the same outcome. They reduced the same numbers in the same order;
    /// a rank that differs must not continue, because it would wait for ranks that do something
    /// else.
    ///
    /// # Errors
    /// A rank updates its weights and another does not, or the state of a rank has changed since the
    /// last update.
    /// # Collective
    /// All ranks; a few numbers.
    pub(crate) fn check_ranks_agree(
        &self,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<Agreed, TrainError> {
        let bad = f64::from(u8::from(!outcome.is_update));
        let seconds = elapsed.as_secs_f64();
        let memory = used_bytes(&self.device) as f64;
        let loss = Some(outcome.loss).filter(|_| outcome.is_finite());
        let changed = f64::from(u8::from(self.has_changed()));
        let own = [seconds, memory, bad, loss.unwrap_or(f64::INFINITY), changed];
        let largest = world_max(&self.groups, &own)?;
        if largest[4] > 0.0 {
            self.check_unchanged()?;
        }
        if largest[2] > bad {
            let rank = self.groups.world.rank();
            let step = self.progress.step + 1;
            return Err(TrainError::Disagrees { step, rank });
        }
        Ok(Agreed {
            seconds: largest[0],
            memory: largest[1],
            loss: Some(largest[3]).filter(|loss| loss.is_finite()),
        })
    }

    /// Advances the run by a step over `samples` samples, of whose tokens `tokens` count in the loss,
    /// and adapts the loss scale.
    ///
    /// # Errors
    /// The step is not finite, except in f16, or too many consecutive steps were skipped.
    pub(crate) fn advance(
        &mut self,
        samples: u64,
        tokens: u64,
        outcome: Outcome,
    ) -> Result<(), TrainError> {
        let Outcome {
            loss,
            grad_norm,
            is_update,
            is_spike,
        } = outcome;
        let step = self.progress.step + 1;
        let bound = self.spike_bound.unwrap_or_default();
        let is_finite = outcome.is_finite();
        self.spike = (is_spike && is_finite).then_some(Spike { step, loss, bound });
        if is_spike && self.config.train.on_spike == OnSpike::Stop {
            return Err(TrainError::LossSpike { step, loss, bound });
        }
        if !is_finite && self.loss_scaler.is_none() {
            let diagnosis = Diagnosis::None;
            return Err(TrainError::NonFinite {
                step,
                loss,
                grad_norm,
                diagnosis,
            });
        }
        self.consecutive_skips = if is_update {
            0
        } else {
            self.consecutive_skips + 1
        };
        let backoffs = self
            .loss_scaler
            .as_ref()
            .map_or(0, LossScaler::max_backoffs);
        if self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS.saturating_add(backoffs) {
            let loss_scale = self.loss_scaler.as_ref().map_or(1.0, LossScaler::scale);
            let skips = self.consecutive_skips;
            let diagnosis = Diagnosis::None;
            return Err(TrainError::TooManySkippedSteps {
                step,
                skips,
                loss,
                grad_norm,
                loss_scale,
                diagnosis,
            });
        }
        if let Some(scaler) = &mut self.loss_scaler {
            scaler.update(!is_finite);
        }
        self.add_loss(outcome);
        self.progress.advance(samples, tokens, is_update);
        Ok(())
    }

    /// Reads a number of the device that only exists if its setting asks for it.
    ///
    /// # Errors
    /// A device that failed.
    pub(crate) fn read_if_logged<S>(
        &self,
        scalar: Option<S>,
        read: impl FnOnce(&S) -> Result<f64, OptimError>,
    ) -> Result<Option<f64>, TrainError> {
        scalar
            .map(|scalar| self.device_error(read(&scalar)))
            .transpose()
    }

    /// Converts the failure of a device into an error of the run.
    pub(crate) fn device_error<T>(&self, read: Result<T, OptimError>) -> Result<T, TrainError> {
        read.map_err(|error| match error {
            OptimError::Device { why } => device_error(why, &self.device),
            error => error.into(),
        })
    }
}

/// The limit that a setting stands for: 0 means none.
fn limit(setting: f64) -> f64 {
    if setting > 0.0 {
        setting
    } else {
        f64::INFINITY
    }
}
