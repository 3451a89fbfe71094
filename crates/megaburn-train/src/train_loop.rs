//! The steps of a run, with what happens between them: evaluations, checkpoints, the end.
//!
//! A step is written down before anything that may fail; a checkpoint is saved before an evaluation, which
//! computes nothing that a checkpoint holds.

use megaburn_collective::{PhaseGuard, ProcessGroups, Pulse, objects};

use crate::{
    TrainConfig, TrainError,
    metrics::EvalMetrics,
    report::Reporter,
    signal::StopSignal,
    trainer::{Trainer, agree_to_stop},
};

/// A rank of a run that is ready to train.
pub(crate) struct TrainLoop<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) groups: &'a ProcessGroups,
    pub(crate) trainer: Trainer,
    /// On rank 0.
    pub(crate) report: Option<Reporter<'a>>,
    pub(crate) stop: &'a StopSignal,
    /// The step of the newest checkpoint.
    pub(crate) saved: Option<u64>,
    /// Beats with each step.
    pub(crate) pulse: Pulse,
    /// Held until the first step is done, where that step still belongs to the start.
    pub(crate) starting: Option<PhaseGuard>,
}

/// Whether the run goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    Stop,
}

impl TrainLoop<'_> {
    /// Trains to the last step, or until the run is asked to stop.
    ///
    /// # Errors
    /// Whatever ends the run.
    /// # Collective
    /// All ranks.
    pub(crate) fn run(mut self) -> Result<(), TrainError> {
        let interval = self.config.train.eval_interval;
        let mut evaluated = self.evaluated()?;
        while !self.trainer.is_finished() {
            // A checkpoint is saved before its evaluation, which a run that ended in between still owes.
            let step = self.trainer.progress().step;
            if self.trainer.evaluates() && due(step, interval) && evaluated != Some(step) {
                match self.evaluate()? {
                    Some(_) => evaluated = Some(step),
                    None => return self.stopped(),
                }
            }
            if self.step()? == Next::Stop {
                return self.stopped();
            }
        }
        self.save()?;
        let mut last = None;
        if self.trainer.evaluates() {
            let Some(eval) = self.evaluate_unless_stopped()? else { return self.stopped() };
            if let Some(report) = &mut self.report {
                report.final_eval(&eval, evaluated)?;
            }
            last = Some(eval);
        }
        let sample = self.trainer.sample()?;
        let step = self.trainer.progress().step;
        self.report.map_or(Ok(()), |report| report.finish(step, last.as_ref(), sample.as_deref()))
    }

    /// One step, and a checkpoint if it is due.
    fn step(&mut self) -> Result<Next, TrainError> {
        let metrics = match self.trainer.try_step() {
            Ok(metrics) => metrics,
            Err(error) => return Err(self.failed(error)),
        };
        drop(self.starting.take());
        self.pulse.beat();
        if let Some(report) = &mut self.report {
            report.step(&metrics)?;
        }
        let train = &self.config.train;
        if due(metrics.step, train.check_replicas_interval) {
            self.trainer.check_replicas()?;
        }
        let stop = self.is_stopped()?;
        if stop || due(metrics.step, train.checkpoint_interval) {
            self.save()?;
        }
        Ok(if stop { Next::Stop } else { Next::GoOn })
    }

    /// A step that is not finite is written down before its diagnosis, which may fail.
    fn failed(&mut self, error: TrainError) -> TrainError {
        if let (TrainError::NonFinite { step, loss, grad_norm, .. }, Some(report)) =
            (&error, &mut self.report)
            && let Err(lost) = report.not_finite(*step, *loss, *grad_norm)
        {
            tracing::warn!("step {step} is not written down: {lost}");
        }
        self.trainer.diagnosed(error)
    }

    fn save(&mut self) -> Result<(), TrainError> {
        let step = self.trainer.progress().step;
        if self.saved == Some(step) {
            return Ok(());
        }
        // Lines up to a checkpoint are never cut off again: they must outlive whatever it does.
        if let Some(report) = &mut self.report {
            report.sync()?;
        }
        self.trainer.save()?;
        self.saved = Some(step);
        Ok(())
    }

    /// Whether any rank was asked to stop, or rank 0 cannot write its metrics any more.
    fn is_stopped(&self) -> Result<bool, TrainError> {
        let gives_up = self.report.as_ref().is_some_and(Reporter::gives_up);
        agree_to_stop(self.groups, self.stop.requested().is_some() || gives_up)
    }

    /// Evaluates and says so; none if the run was asked to stop meanwhile.
    fn evaluate(&mut self) -> Result<Option<EvalMetrics>, TrainError> {
        let eval = self.evaluate_unless_stopped()?;
        if let (Some(report), Some(eval)) = (&mut self.report, &eval) {
            report.eval(eval)?;
        }
        Ok(eval)
    }

    fn evaluate_unless_stopped(&self) -> Result<Option<EvalMetrics>, TrainError> {
        self.trainer.evaluate_unless(|| self.is_stopped())
    }

    /// The last step of which the metrics have an evaluation.
    fn evaluated(&self) -> Result<Option<u64>, TrainError> {
        let mine = self.report.as_ref().and_then(Reporter::evaluated);
        Ok(objects::broadcast(&self.groups.world, &mine)?)
    }

    fn stopped(mut self) -> Result<(), TrainError> {
        self.save()?;
        let step = self.trainer.progress().step;
        self.report.map_or(Ok(()), |report| report.stopped(step, self.stop))
    }
}

fn due(step: u64, interval: u64) -> bool {
    interval > 0 && step > 0 && step.is_multiple_of(interval)
}
