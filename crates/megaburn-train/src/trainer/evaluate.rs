use burn::module::Module;

use crate::{
    TrainError,
    metrics::EvalMetrics,
    trainer::{Trainer, batch::inputs_and_labels, stats::Sums},
};

impl Trainer {
    /// The loss on unseen data: the first `train.eval_batches` global batches of the validation
    /// part, always the same ones.
    ///
    /// # Collective
    /// All ranks.
    pub(crate) fn evaluate(&self) -> Result<EvalMetrics, TrainError> {
        let model = self.model().valid();
        let plain = self.device.clone().inner();
        let global_batch = self.config.train.global_batch as u64;
        let mut sums = Sums::default();
        for batch in 0..self.eval_batches() {
            for index in 0..self.batch.num_micro_batches() {
                let first = batch * global_batch;
                let samples = self.batch.micro_batch(first, self.groups.dp.rank(), index);
                let (tokens, labels) = inputs_and_labels(&self.valid.batch(samples), &plain);
                let (loss, count) = model.loss(tokens, labels);
                sums.add(f64::from(loss.into_scalar::<f32>()), count);
            }
        }
        let eval_loss = sums.over(&self.groups.dp_cp)?.mean();
        Ok(EvalMetrics { step: self.progress.step, eval_loss })
    }

    /// As many as were asked for and the validation part has; at least one, which then repeats
    /// samples.
    fn eval_batches(&self) -> u64 {
        let there = self.valid.num_samples() / self.config.train.global_batch as u64;
        (self.config.train.eval_batches as u64).min(there).max(1)
    }
}
