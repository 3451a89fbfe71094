use burn::module::Module;
use megaburn_data::Samples;
use megaburn_pipeline::run;
use megaburn_report::metrics::EvalMetrics;

use crate::{
    data::EvalSamples,
    error::TrainError,
    eval::SetLoss,
    run_trainer::StopCheck,
    trainer::{
        Trainer,
        hybrid_context::HybridContext,
        passes::Evaluation,
        stats::{LossTotals, Losses},
    },
    trainer_core::Work,
};

impl Trainer {
    /// The loss on unseen data: on the first `train.eval_batches` global batches of the validation
    /// data, or on all of it if it is shorter. Each sample is used once, and always the same ones.
    /// With several sets in `data.valid`, this is the first one.
    ///
    /// # Errors
    /// There is no validation data; a failed collective; a device that failed or is out of
    /// memory.
    /// # Collective
    /// All ranks.
    pub fn evaluate(&self) -> Result<EvalMetrics, TrainError> {
        let Some(first) = self.samples.valid.first() else {
            let key = "data.validation_fraction";
            let rule = "more than 0 for an evaluation";
            return Err(TrainError::Invalid {
                key,
                value: "0".into(),
                rule: rule.into(),
            });
        };
        let eval = self.evaluate_on(first, &mut || Ok(false))?;
        Ok(eval.expect("the evaluation cannot be stopped"))
    }

    /// The losses on all of `sets`, as [`evaluate`](Self::evaluate) computes them. It returns `None`
    /// before the next global batch if `stop` returns true.
    ///
    /// # Errors
    /// As [`evaluate`](Self::evaluate); also the errors of `stop`.
    /// # Collective
    /// All ranks; `stop` must return the same on all of them.
    pub(super) fn evaluate_all(
        &self,
        sets: &[EvalSamples],
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<Vec<EvalMetrics>>, TrainError> {
        sets.iter().map(|set| self.evaluate_on(set, stop)).collect()
    }

    /// The losses on all validation sets, with the numbers of their tokens.
    ///
    /// # Errors
    /// As [`evaluate`](Self::evaluate).
    /// # Collective
    /// All ranks.
    pub(crate) fn set_losses(&self) -> Result<Vec<SetLoss>, TrainError> {
        let of = |set: &EvalSamples| {
            let totals = self.totals_on(set, &mut || Ok(false))?;
            let totals = totals.expect("the evaluation cannot be stopped");
            let name = set.name.clone().unwrap_or_default();
            let bytes = self.data.bytes_per_token_of(set.name.as_deref());
            Ok(SetLoss::new(name, totals.tokens(), totals.mean(), bytes))
        };
        self.samples.valid.iter().map(of).collect()
    }

    fn evaluate_on(
        &self,
        set: &EvalSamples,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<EvalMetrics>, TrainError> {
        let totals = self.totals_on(set, stop)?;
        Ok(totals.map(|totals| EvalMetrics {
            step: self.core.progress.step,
            data: set.name.clone(),
            eval_loss: totals.mean(),
            mtp_losses: totals.mtp_means(),
            sop_loss: totals.binary_mean(),
            ..EvalMetrics::default()
        }))
    }

    /// The losses on a set, summed over all ranks.
    fn totals_on(
        &self,
        set: &EvalSamples,
        stop: &mut StopCheck<'_>,
    ) -> Result<Option<LossTotals>, TrainError> {
        let valid = &*set.samples;
        let _compiling = self
            .core
            .first_times
            .begin(Work::Evaluation, &self.core.groups.world);
        let model = self.model().valid();
        let _unchanged = model.unchanged_weights();
        let inner_device = self.core.device.clone().inner();
        let global_batch = self.core.config.train.global_batch as u64;
        let wanted = (self.core.config.train.eval_batches as u64).saturating_mul(global_batch);
        let total = wanted.min(valid.num_samples());
        let mut losses = Losses::of(&self.model_config);
        let schedule = self
            .core
            .pipeline
            .forward_only(self.core.batch.num_micro_batches())?;
        let spec = self.p2p_spec();
        for step in 0..total.div_ceil(global_batch) {
            if stop()? {
                self.core.sharding.check()?;
                self.core.sharding.release();
                return Ok(None);
            }
            let model = &model;
            let inner_device = &inner_device;
            let losses = &mut losses;
            let first = step * global_batch;
            let hybrid = self.hybrid_batches(valid, first, total)?;
            let hybrid_schedule = hybrid
                .as_ref()
                .map(|hybrid| self.core.pipeline.forward_only(hybrid.num_passes()))
                .transpose()?;
            let mut executor = Evaluation {
                trainer: self,
                model,
                first,
                total,
                valid,
                inner_device,
                losses,
                hybrid: hybrid.as_ref(),
            };
            let schedule = hybrid_schedule.as_ref().unwrap_or(&schedule);
            run(schedule, &spec, &mut executor)?;
        }
        // Check for a lost rank first, so that it is reported instead of a NaN loss.
        self.core.sharding.check()?;
        self.core.sharding.release();
        Ok(Some(losses.read()?.over(&self.core.groups.batch)?))
    }

    /// The assignment of the documents of the global batch that begins at sample `first`, with
    /// hybrid context parallelism; otherwise `None`.
    fn hybrid_batches(
        &self,
        valid: &dyn Samples,
        first: u64,
        total: u64,
    ) -> Result<Option<HybridContext>, TrainError> {
        let Some(mut hybrid) = self.hybrid.clone() else {
            return Ok(None);
        };
        let end = total.min(first + self.core.config.train.global_batch as u64);
        hybrid.assign(&self.documents_of(valid, first..end)?)?;
        Ok(Some(hybrid))
    }
}
