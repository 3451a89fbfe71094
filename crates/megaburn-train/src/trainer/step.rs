use std::{
    ops::Range,
    time::{Duration, Instant},
};

use megaburn_data::Sample;
use megaburn_optim::{DeviceScalar, GradNorm, LossScaler, OptimError};
use megaburn_parallel::TokenBlock;
use megaburn_pipeline::{P2pSpec, run};
use megaburn_report::{metrics::StepMetrics, profile::range};

use crate::{
    diagnosis::Diagnosis,
    error::TrainError,
    failure::device_error,
    memory::used_bytes,
    trainer::{
        Trainer,
        hybrid_context::HybridContext,
        passes::{ReduceScope, Training},
        stats::{Agreed, Losses, StepLossTotals, Work},
        update::limit,
    },
};

/// Give up after this many consecutive skipped steps, not counting loss-scale back-offs.
const MAX_CONSECUTIVE_SKIPS: u64 = 100;

/// The outcome of a step, the same on every rank.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Mean loss in nats per token.
    loss: f64,
    grad_norm: f64,
    is_update: bool,
}

impl Outcome {
    fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

impl Trainer {
    /// One optimizer step over the next global batch. A step whose gradient norm exceeds
    /// `optimizer.grad_norm_skip_threshold`, or overflowed f16, is skipped: it changes nothing, and
    /// its metrics say so.
    ///
    /// # Errors
    /// A non-finite loss or gradient norm, except in f16, or too many consecutive skipped steps:
    /// weights and optimizer are unchanged on every rank. A failed collective, or a device that
    /// failed or is out of memory: this trainer cannot be used any more, and a new one resumes from
    /// a checkpoint.
    /// # Collective
    /// All ranks.
    pub fn step(&mut self) -> Result<StepMetrics, TrainError> {
        self.try_step().map_err(|error| self.diagnosed(error))
    }

    /// As [`step`](Self::step), without the diagnosis of a non-finite step, which
    /// [`diagnosed`](Self::diagnosed) adds.
    pub(crate) fn try_step(&mut self) -> Result<StepMetrics, TrainError> {
        let started = Instant::now();
        let samples = self.next_batch().global_batch_size() as u64;

        // Forward and backward over the micro-batches, in the schedule's order.
        let (losses, loss_factor) = self.forward_backward(ReduceScope::DataParallel)?;

        // Sum the gradients over the ranks; make them means over tokens.
        let reduce = range("reduce");
        self.grads.reduce()?;
        self.pipeline.all_reduce_tied(&mut self.grads)?;
        let work = losses.work_over(&self.groups.batch)?;
        let Work {
            tokens,
            rows,
            flops,
            ..
        } = work;
        self.grads.scale(1.0 / (loss_factor * tokens.max(1.0)));
        let norm = self.grads.norm()?;
        let StepLossTotals { loss, mtp, binary } =
            losses.sum_over(&self.groups.batch, &self.device)?;
        drop(reduce);

        // Clip and update; the device skips it if loss or gradient is not finite.
        let progress = self.progress;
        let trained = progress.consumed_samples - progress.skipped_samples;
        let rates = self.schedules.rates(trained, samples);
        let log_num_zeros = self.config.train.log_num_zeros;
        let num_zeros = log_num_zeros.then(|| self.grads.num_zeros()).transpose()?;
        self.grads.skip_if_not_finite(&loss);
        self.clip_and_update(&rates, &norm)?;
        self.enqueued = started.elapsed();
        // The host has only enqueued so far; here it waits for the device.
        let outcome = self.read_outcome(&loss, &norm, tokens);
        if !outcome.as_ref().is_ok_and(|outcome| outcome.is_update) {
            // The update detected this on the device and changed nothing.
            self.optimizer.revert_step_count();
        }
        let outcome = outcome?;

        // Check that all ranks agree, and advance.
        let loss_scale = self.loss_scaler.as_ref().map(LossScaler::scale);
        let step = progress.step + 1;
        let agreed = self.check_ranks_agree(step, outcome, started.elapsed())?;
        if !outcome.is_update {
            // Scales of the next step are not those that the update was to lead to.
            self.send_in_full(|_| true)?;
        }
        self.advance(step, samples, outcome)?;
        let max_attention_logit = self.clip_queries_and_keys(outcome.is_update)?;
        self.advance_scales(outcome.is_update)?;
        let precision = self.end_precision(outcome.is_update, agreed.loss)?;
        let log_params_norm = self.config.train.log_params_norm;
        let params_norm = log_params_norm
            .then(|| self.grads.params_norm(self.model()))
            .transpose()?;
        let experts = self.balance_experts(tokens, outcome.is_update)?;

        // Metrics.
        let Outcome {
            loss,
            grad_norm,
            is_update,
        } = outcome;
        let mean = |sum: &DeviceScalar| {
            Ok::<_, TrainError>(self.device_error(sum.read())? / tokens.max(1.0))
        };
        let sop_loss = self.read_if_logged(binary, DeviceScalar::read)?;
        let mtp_losses = mtp.iter().map(mean).collect::<Result<_, _>>()?;
        let num_zeros = self.read_if_logged(num_zeros, DeviceScalar::read)?;
        let params_norm = self.read_if_logged(params_norm, GradNorm::read)?;
        Ok(StepMetrics {
            step,
            loss,
            grad_norm,
            lr: rates.lr,
            tokens: tokens as u64,
            tokens_per_second: self.num_read(&work) / agreed.seconds,
            tflops: flops / agreed.seconds / self.groups.world.size() as f64 / 1e12,
            memory_bytes: agreed.memory as u64,
            loss_scale,
            skipped: !is_update,
            padding: self.pads_rows().then_some(work.padding),
            num_zeros: num_zeros.map(|zeros| zeros as u64),
            params_norm,
            max_attention_logit,
            mtp_losses,
            sop_loss: sop_loss.map(|sum| sum / rows.max(1.0)),
            precision,
            experts,
        })
    }

    /// Checks that all ranks have the same outcome. They reduced the same numbers in the same order;
    /// a rank that differs must not continue, because it would wait for ranks that do something
    /// else.
    fn check_ranks_agree(
        &self,
        step: u64,
        outcome: Outcome,
        elapsed: Duration,
    ) -> Result<Agreed, TrainError> {
        let bad = f64::from(u8::from(!outcome.is_update));
        let memory = used_bytes(&self.device) as f64;
        let agreed = Agreed {
            seconds: elapsed.as_secs_f64(),
            memory,
            bad,
            loss: outcome.is_finite().then_some(outcome.loss),
        };
        let agreed = agreed.over(&self.groups)?;
        if agreed.bad > bad {
            let rank = self.groups.world.rank();
            return Err(TrainError::Disagrees { step, rank });
        }
        Ok(agreed)
    }

    /// Reads the outcome of the step from the device.
    fn read_outcome(
        &self,
        loss: &DeviceScalar,
        norm: &GradNorm,
        tokens: f64,
    ) -> Result<Outcome, TrainError> {
        let loss = self.device_error(loss.read())? / tokens.max(1.0);
        let threshold = limit(self.config.optimizer.grad_norm_skip_threshold);
        let (grad_norm, is_above) = self.device_error(norm.read_against(threshold))?;
        let outcome = Outcome {
            loss,
            grad_norm,
            is_update: !is_above,
        };
        Ok(Outcome {
            is_update: !is_above && outcome.is_finite(),
            ..outcome
        })
    }

    /// Advances the run by a step over `samples` samples, and adapts the loss scale.
    ///
    /// # Errors
    /// The step is not finite, except in f16, or too many consecutive steps were skipped.
    fn advance(&mut self, step: u64, samples: u64, outcome: Outcome) -> Result<(), TrainError> {
        let Outcome {
            loss,
            grad_norm,
            is_update,
        } = outcome;
        if !outcome.is_finite() && self.loss_scaler.is_none() {
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
            scaler.update(!outcome.is_finite());
        }
        let progress = &mut self.progress;
        progress.step = step;
        progress.consumed_samples += samples;
        if !is_update {
            progress.skipped_steps += 1;
            progress.skipped_samples += samples;
        }
        Ok(())
    }

    /// Micro-batch `index` of this rank in its next step: the numbers of its samples, counted over
    /// the full run, and the samples, of which context-parallel ranks take chunks. (With
    /// `parallel.max_tokens_per_rank`, documents are assigned to ranks in a different way.)
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn micro_batch(&self, index: usize) -> Result<(Range<u64>, Vec<Sample>), TrainError> {
        let consumed = self.progress.consumed_samples;
        let numbers = self
            .next_batch()
            .micro_batch(consumed, self.groups.dp.rank(), index);
        let samples = match self.step_samples.get(index) {
            Some(samples) => samples.clone(),
            None => self.samples.train.batch(numbers.clone())?,
        };
        Ok((numbers, samples))
    }

    /// The position of micro-batch `index` of this rank in the run, which determines its dropout
    /// masks.
    pub(super) fn token_block(&self, index: usize) -> TokenBlock {
        let batch = self.next_batch();
        let consumed = self.progress.consumed_samples;
        let numbers = batch.micro_batch(consumed, self.groups.dp.rank(), index);
        let first = (numbers.start - consumed) as usize;
        TokenBlock::new(self.progress.step, batch.global_batch_size(), first)
    }

    /// Number of this rank's micro-batches in the next step, without
    /// `parallel.max_tokens_per_rank`.
    pub fn num_micro_batches(&self) -> usize {
        self.next_batch().num_micro_batches()
    }

    /// Runs forward and backward over this rank's micro-batches. The gradients are those of the
    /// loss (a sum over tokens) times the returned factor.
    pub(super) fn forward_backward(
        &mut self,
        reduce_scope: ReduceScope,
    ) -> Result<(Losses, f64), TrainError> {
        self.grads.reset();
        self.reset_loads()?;
        self.discard_max_logits()?;
        self.discard_amaxes();
        self.read_ahead();
        let batch = self.next_batch();
        // Scale as if the loss were a mean over all tokens, whose gradients fit better into the
        // range of f16.
        let tokens = batch.global_batch_size() * self.config.data.label_len();
        let factor = self
            .loss_scaler
            .as_ref()
            .map(|scaler| scaler.scale() / tokens as f64);
        self.begin_precision()?;
        self.begin_scales(factor.unwrap_or(1.0));
        if let Some(mut hybrid) = self.hybrid.take() {
            let consumed = self.progress.consumed_samples;
            let numbers = consumed..consumed + batch.global_batch_size() as u64;
            let documents = self.documents_of(&*self.samples.train, numbers);
            let assigned = documents.and_then(|documents| hybrid.assign(&documents));
            self.hybrid = Some(hybrid);
            assigned?;
        }
        let num_passes = self
            .hybrid
            .as_ref()
            .map_or(batch.num_micro_batches(), HybridContext::num_passes);
        let binary_factor = self.labels_per_row()?;
        let schedule = self.pipeline.training(num_passes)?;
        let spec = self.p2p_spec();
        let inner_device = self.device.clone().inner();
        let losses = Losses::of(&self.model_config);
        let mut executor = Training {
            trainer: self,
            reduce_scope,
            factor,
            binary_factor,
            inner_device,
            losses,
        };
        let _unchanged = executor.trainer.model_in_flight().unchanged_weights();
        run(&schedule, &spec, &mut executor)?;
        let losses = executor.losses;
        self.step_samples.clear();
        Ok((losses, factor.unwrap_or(1.0)))
    }

    /// The messages between the stages of a pipeline.
    pub(super) fn p2p_spec(&self) -> P2pSpec {
        let tokens = [self.collator().padded, self.batch.micro_batch_size()];
        self.pipeline.p2p_spec(tokens, &self.device)
    }

    /// Reads a number of the device that only exists if its setting asks for it.
    fn read_if_logged<S>(
        &self,
        scalar: Option<S>,
        read: impl FnOnce(&S) -> Result<f64, OptimError>,
    ) -> Result<Option<f64>, TrainError> {
        scalar
            .map(|scalar| self.device_error(read(&scalar)))
            .transpose()
    }

    /// Converts the failure of a device into an error of the run.
    pub(super) fn device_error<T>(&self, read: Result<T, OptimError>) -> Result<T, TrainError> {
        read.map_err(|error| match error {
            OptimError::Device { why } => device_error(why, &self.device),
            error => error.into(),
        })
    }
}
