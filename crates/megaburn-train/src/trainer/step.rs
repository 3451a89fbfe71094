use std::{ops::Range, time::Instant};

use megaburn_data::Sample;
use megaburn_optim::{DeviceScalar, GradNorm, LossScaler};
use megaburn_parallel::TokenBlock;
use megaburn_pipeline::{P2pSpec, run};
use megaburn_report::metrics::StepMetrics;

use crate::{
    error::TrainError,
    trainer::{
        Trainer,
        hybrid_context::HybridContext,
        passes::{ReduceScope, Training},
        stats::{Losses, StepLossTotals, Work},
    },
    trainer_core::Outcome,
};

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
        self.undiagnosed_step()
            .map_err(|error| self.with_origin(error))
    }

    /// As [`step`](Self::step), without the diagnosis of a non-finite step, which
    /// [`with_origin`](Self::with_origin) adds.
    pub(super) fn undiagnosed_step(&mut self) -> Result<StepMetrics, TrainError> {
        let started = Instant::now();
        let samples = self.core.next_batch().global_batch_size() as u64;

        // Forward and backward over the micro-batches, in the schedule's order.
        self.core.begin_layer_statistics();
        let (losses, loss_factor) = self.forward_backward(ReduceScope::DataParallel)?;

        // Sum the gradients over the ranks; make them means over tokens.
        let reduce = self.core.part("reduce");
        self.core.reduce_grads()?;
        let work = losses.work_over(&self.core.groups.batch)?;
        let Work {
            tokens,
            rows,
            flops,
            ..
        } = work;
        self.core.grads.scale(1.0 / (loss_factor * tokens.max(1.0)));
        let counted = self.core.count_gradients()?;
        let norm = self.core.grads.norm()?;
        let StepLossTotals {
            loss,
            own_losses,
            mtp,
            binary,
        } = losses.sum_over(&self.core.groups.batch, &self.core.device)?;
        self.core.own_losses = Some(own_losses);
        drop(reduce);

        // Clip and update; the device skips it if loss or gradient is not finite.
        let rates = self.core.next_rates(samples);
        let num_zeros = self.core.num_zeros()?;
        self.core.grads.skip_if_not_finite(&loss);
        self.core.skip_spike(&loss, tokens);
        self.clip_and_update(&rates, &norm)?;
        self.core.enqueued = started.elapsed();
        // The host has only enqueued so far; here it waits for the device.
        let outcome = self.core.read_outcome(&loss, &norm, tokens)?;

        // Check that all ranks agree, and advance.
        let loss_scale = self.core.loss_scaler.as_ref().map(LossScaler::scale);
        let agreed = self.core.check_ranks_agree(outcome, started.elapsed())?;
        if !outcome.is_update {
            // Scales of the next step are not those that the update was to lead to.
            self.send_in_full(|_| true)?;
        }
        self.core.advance(samples, tokens as u64, outcome)?;
        let max_attention_logit = self.clip_queries_and_keys(outcome.is_update)?;
        self.advance_scales(outcome.is_update)?;
        let precision = self.end_precision(outcome.is_update, agreed.loss)?;
        let params_norm = self.core.params_norm()?;
        self.core.end_layer_statistics(counted)?;
        let experts = self.balance_experts(tokens, outcome.is_update)?;

        // Metrics.
        let Outcome {
            loss,
            grad_norm,
            is_update,
            ..
        } = outcome;
        let mean = |sum: &DeviceScalar| {
            Ok::<_, TrainError>(self.core.device_error(sum.read())? / tokens.max(1.0))
        };
        let sop_loss = self.core.read_if_logged(binary, DeviceScalar::read)?;
        let mtp_losses = mtp.iter().map(mean).collect::<Result<_, _>>()?;
        let num_zeros = self.core.read_if_logged(num_zeros, DeviceScalar::read)?;
        let params_norm = self.core.read_if_logged(params_norm, GradNorm::read)?;
        Ok(StepMetrics {
            step: self.core.progress.step,
            loss,
            grad_norm,
            lr: rates.lr,
            tokens: tokens as u64,
            tokens_per_second: self.num_read(&work) / agreed.seconds,
            tflops: flops / agreed.seconds / self.core.groups.world.size() as f64 / 1e12,
            memory_bytes: agreed.memory as u64,
            consumed_tokens: self.core.progress.consumed_tokens,
            group_lrs: rates.of_groups(),
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
            ..StepMetrics::default()
        })
    }

    /// Micro-batch `index` of this rank in its next step: the numbers of its samples, counted over
    /// the full run, and the samples, of which context-parallel ranks take chunks. (With
    /// `parallel.max_tokens_per_rank`, documents are assigned to ranks in a different way.) Samples
    /// that `train.pad_batch` adds are left out.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub fn micro_batch(&self, index: usize) -> Result<(Range<u64>, Vec<Sample>), TrainError> {
        let consumed = self.core.progress.consumed_samples;
        let (batch, dp) = (self.core.next_batch(), self.core.groups.dp.rank());
        let first = batch.micro_batch(consumed, dp, index).start;
        let (mut samples, counted) = self.rows(index)?;
        let numbers = first + counted.start as u64..first + counted.end as u64;
        Ok((numbers, samples.drain(counted).collect()))
    }

    /// All samples of micro-batch `index`, and which of them count.
    pub(super) fn rows(&self, index: usize) -> Result<(Vec<Sample>, Range<usize>), TrainError> {
        let consumed = self.core.progress.consumed_samples;
        let (batch, dp) = (self.core.next_batch(), self.core.groups.dp.rank());
        let samples = match self.step_samples.get(index) {
            Some(samples) => samples.clone(),
            None => {
                let numbers = batch.micro_batch(consumed, dp, index);
                self.samples.train.batch(numbers)?
            }
        };
        Ok((samples, batch.counted(consumed, dp, index)))
    }

    /// The position of micro-batch `index` of this rank in the run, which determines its dropout
    /// masks.
    pub(super) fn token_block(&self, index: usize) -> TokenBlock {
        let batch = self.core.next_batch();
        let consumed = self.core.progress.consumed_samples;
        let numbers = batch.micro_batch(consumed, self.core.groups.dp.rank(), index);
        let first = (numbers.start - consumed) as usize;
        TokenBlock::new(self.core.progress.step, batch.global_batch_size(), first)
    }

    /// Number of this rank's micro-batches in the next step, without
    /// `parallel.max_tokens_per_rank`.
    pub fn num_micro_batches(&self) -> usize {
        self.core.next_batch().num_micro_batches()
    }

    /// Runs forward and backward over this rank's micro-batches. The gradients are those of the
    /// loss (a sum over tokens) times the returned factor.
    pub(super) fn forward_backward(
        &mut self,
        reduce_scope: ReduceScope,
    ) -> Result<(Losses, f64), TrainError> {
        self.core.grads.reset();
        self.reset_loads()?;
        self.discard_max_logits()?;
        self.discard_amaxes();
        self.read_ahead();
        let batch = self.core.next_batch();
        // Scale as if the loss were a mean over all tokens, whose gradients fit better into the
        // range of f16.
        let tokens = batch.global_batch_size() * self.core.config.data.label_len();
        let factor = self
            .core
            .loss_scaler
            .as_ref()
            .map(|scaler| scaler.scale() / tokens as f64);
        self.begin_precision()?;
        self.begin_scales(factor.unwrap_or(1.0));
        if let Some(mut hybrid) = self.hybrid.take() {
            let consumed = self.core.progress.consumed_samples;
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
        let schedule = self.core.pipeline.training(num_passes)?;
        let spec = self.p2p_spec();
        let inner_device = self.core.device.clone().inner();
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
        let tokens = [self.collator().padded, self.core.batch.micro_batch_size()];
        self.core.pipeline.p2p_spec(tokens, &self.core.device)
    }
}
