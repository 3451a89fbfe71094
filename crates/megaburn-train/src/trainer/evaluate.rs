use burn::module::Module;

use crate::{
    TrainError,
    metrics::EvalMetrics,
    trainer::{
        Trainer,
        batch::{Batch, tensors},
        stats::Losses,
    },
};

impl Trainer {
    /// The loss on unseen data: the first `train.eval_batches` global batches of the validation
    /// part, or all of it if that is less; each sample once, always the same ones.
    ///
    /// # Errors
    /// A failed collective; a device that failed or is out of memory.
    /// # Collective
    /// All ranks.
    pub fn evaluate(&self) -> Result<EvalMetrics, TrainError> {
        let model = self.model().valid();
        let plain = self.device.clone().inner();
        let global_batch = self.config.train.global_batch as u64;
        let wanted = (self.config.train.eval_batches as u64).saturating_mul(global_batch);
        let total = wanted.min(self.valid.num_samples());
        let mut losses = Losses::default();
        for step in 0..total.div_ceil(global_batch) {
            for index in 0..self.batch.num_micro_batches() {
                let first = step * global_batch;
                let numbers = self.batch.micro_batch(first, self.groups.dp.rank(), index);
                // Behind the end the sampler starts again: those samples do not count.
                let counted = total.saturating_sub(numbers.start) as usize;
                let samples = self.valid.batch(numbers);
                let Batch { tokens, labels, counted } = tensors(&samples, counted, &plain);
                losses.add(model.loss(tokens, labels), counted);
            }
        }
        // A rank that is gone says so, and not that the loss is no number.
        self.sharding.check()?;
        self.sharding.release();
        let eval_loss = losses.read()?.over(&self.groups.dp_cp)?.mean();
        Ok(EvalMetrics { step: self.progress.step, eval_loss })
    }
}
