//! The evaluation of a task's model.

use burn::module::Module;
use megaburn_pipeline::run;
use megaburn_report::metrics::EvalMetrics;

use super::{passes::Evaluation, totals::Totals, train_task::TrainTask, trainer::ModelTrainer};
use crate::{error::TrainError, run_trainer::StopCheck, trainer_core::Work};

impl<T: TrainTask> ModelTrainer<T> {
    /// The mean loss on the first `train.eval_batches` global batches of the validation data, or on
    /// all of them if there are fewer. `None` without validation data, or if `stop` returned true in
    /// between.
    ///
    /// # Errors
    /// The task fails; a failed collective or device; the errors of `stop`.
    /// # Collective
    /// All ranks; `stop` must return the same on all of them.
    pub(super) fn evaluation(
        &self,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<EvalMetrics>, TrainError> {
        let Some(valid) = &self.data.valid else {
            return Ok(None);
        };
        let core = &self.core;
        let _compiling = core.first_times.begin(Work::Evaluation, &core.groups.world);
        let model = core.model().valid();
        let global_batch = core.config.train.global_batch;
        let num_batches = (valid.num_samples() / global_batch).min(core.config.train.eval_batches);
        let num_micro_batches = core.batch.num_micro_batches();
        let schedule = core.pipeline.forward_only(num_micro_batches)?;
        let spec = self.p2p_spec();
        let mut totals = Totals::of::<T::Model>();
        for batch in 0..num_batches {
            if stop()? {
                core.sharding.check()?;
                core.sharding.release();
                return Ok(None);
            }
            let mut evaluation = Evaluation {
                core,
                model: &model,
                data: &**valid,
                stages: &self.stages,
                shape: self.shape,
                first: (batch * global_batch) as u64,
                totals: &mut totals,
            };
            run(&schedule, &spec, &mut evaluation)?;
        }
        // Check for a lost rank first, so that it is reported instead of a NaN loss.
        core.sharding.check()?;
        core.sharding.release();
        let num_items = totals.work_over(&core.groups.batch)?.num_items;
        let sums = totals.sum_over(&core.groups.batch, &core.device)?;
        Ok(Some(EvalMetrics {
            step: core.progress.step,
            eval_loss: core.device_error(sums.loss.read())? / num_items.max(1.0),
            task: sums.means(num_items)?,
            ..EvalMetrics::default()
        }))
    }
}
