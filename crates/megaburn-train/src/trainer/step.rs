use std::{ops::Range, time::Instant};

use megaburn_optim::{GradNorm, OptimError};

use crate::{
    TrainError,
    failure::told,
    memory::used_bytes,
    metrics::StepMetrics,
    profile::range,
    trainer::{
        Trainer,
        batch::{Batch, batch},
        stats::{Losses, world_max},
    },
};

impl Trainer {
    /// One optimizer step over the next global batch.
    ///
    /// # Errors
    /// A loss or gradient norm that is not finite, in which case weights and optimizer are as before
    /// on every rank. A failed collective, or a device that failed or is out of memory: on GPUs this
    /// trainer's weights cannot be read any more then, and a new one goes on from a checkpoint.
    /// # Collective
    /// All ranks.
    pub fn step(&mut self) -> Result<StepMetrics, TrainError> {
        let started = Instant::now();
        let losses = self.accumulate_gradients();
        let reduce = range("reduce");
        self.grads.reduce(&self.groups.dp_cp)?;
        let tokens = losses.tokens_over(&self.groups.dp_cp)?;
        self.grads.scale(1.0 / tokens.max(1.0));
        let norm = self.grads.norm(&self.groups.model)?;
        let loss = losses.sum_over(&self.groups.dp_cp)?;
        drop(reduce);
        let step = self.progress.step + 1;
        let lr = self.schedule.lr(step);
        self.grads.guard(&loss);
        self.update(lr, &norm);
        self.enqueued = started.elapsed();
        // The host has only enqueued so far; here it waits for the device.
        let read = self.number(loss.read()).and_then(|loss| Ok((loss, self.number(norm.read())?)));
        let is_step = read.as_ref().is_ok_and(|(loss, norm)| loss.is_finite() && norm.is_finite());
        if !is_step {
            // The update has seen that too, and done nothing.
            self.optimizer.uncount();
        }
        let (loss, grad_norm) = read?;
        let loss = loss / tokens.max(1.0);
        if !is_step {
            let param = self.grads.find_non_finite().map(str::to_string);
            return Err(TrainError::NonFinite { step, loss, grad_norm, param });
        }
        self.progress.step = step;
        self.progress.consumed_samples += self.config.train.global_batch as u64;
        self.measure(
            started,
            StepMetrics {
                step,
                loss,
                grad_norm,
                lr,
                tokens: tokens as u64,
                tokens_per_second: 0.0,
                tflops: 0.0,
                memory_bytes: used_bytes(&self.device),
            },
        )
    }

    /// What this rank reads as micro-batch `index` of its next step: the samples' numbers, counted
    /// over the whole run, and the `seq_len + 1` tokens of each.
    pub fn micro_batch(&self, index: usize) -> (Range<u64>, Vec<Vec<u32>>) {
        let consumed = self.progress.consumed_samples;
        let numbers = self.batch.micro_batch(consumed, self.groups.dp.rank(), index);
        (numbers.clone(), self.train.batch(numbers))
    }

    /// Forward and backward over this rank's micro-batches.
    fn accumulate_gradients(&mut self) -> Losses {
        self.grads.reset();
        let plain = self.device.clone().inner();
        let mut losses = Losses::default();
        for index in 0..self.batch.num_micro_batches() {
            let (_, samples) = self.micro_batch(index);
            let Batch { tokens, labels, counted } = batch(&samples, samples.len(), &plain);
            let forward = range("forward");
            let loss = self.model().loss(tokens, labels);
            drop(forward);
            losses.add(loss.clone().inner(), counted);
            let _backward = range("backward");
            let mut grads = loss.backward();
            let model = self.model.as_ref().expect("the model is only away during an update");
            self.grads.accumulate(model, &mut grads);
        }
        losses
    }

    fn update(&mut self, lr: f64, norm: &GradNorm) {
        let _update = range("update");
        let clip_grad = self.config.optimizer.clip_grad;
        self.grads.clip(norm, if clip_grad > 0.0 { clip_grad } else { f64::INFINITY });
        let model = self.model.take().expect("the model is only away during an update");
        self.model = Some(self.optimizer.step(lr, model, &self.grads));
    }

    /// A number from the device.
    fn number(&self, read: Result<f64, OptimError>) -> Result<f64, TrainError> {
        read.map_err(|error| match error {
            OptimError::Device { why } => told(why, &self.device),
            error => error.into(),
        })
    }

    /// Fills in what depends on the clock and on all ranks.
    fn measure(
        &self,
        started: Instant,
        mut metrics: StepMetrics,
    ) -> Result<StepMetrics, TrainError> {
        let slowest = world_max(
            &self.groups,
            &[started.elapsed().as_secs_f64(), metrics.memory_bytes as f64],
        )?;
        let [seconds, memory] = slowest[..] else { unreachable!("two numbers went in") };
        let (samples, seq_len) = (self.config.train.global_batch, self.config.data.seq_len);
        let flops = self.model_config.flop_shape().training(samples, seq_len);
        metrics.tokens_per_second = metrics.tokens as f64 / seconds;
        metrics.tflops = flops / seconds / self.groups.world.size() as f64 / 1e12;
        metrics.memory_bytes = memory as u64;
        Ok(metrics)
    }
}
