//! The training loop of a run:
//!
//! ```text
//! while steps remain {
//!     evaluate if due; step; report; roll back after a spike; compare the state if due
//!     continue the asynchronous save; save if due or stopped, after comparing the state
//! }
//! save; evaluate; sample
//! ```
//!
//! A step is recorded before anything that may fail. A checkpoint is saved before an evaluation,
//! which changes nothing that a checkpoint holds.

mod not_finite;
mod rollback;
mod stragglers;
mod suspects;

use std::ops::ControlFlow;

use megaburn_collective::{Phase, PhaseGuard, ProcessGroups, Pulse, objects};
use megaburn_report::{metrics::EvalMetrics, profile::Trace};

use crate::{
    config::TrainConfig,
    error::TrainError,
    gpu_health::GpuHealthReports,
    profile::Profiler,
    report::Reporter,
    run_trainer::{RunTrainer, StopCheck},
    saves::{SavedCheckpoint, Saves},
    state::StateFile,
    stop::{StopReason, Stops},
    stored_checkpoints::{StoredCheckpoints, UploadedCheckpoint},
    stragglers::Stragglers,
};

/// A rank that is ready to train.
pub(crate) struct TrainLoop<'a, T> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) groups: &'a ProcessGroups,
    pub(crate) trainer: T,
    /// The reporter; only on rank 0.
    pub(crate) report: Option<Reporter<'a>>,
    pub(crate) stops: &'a Stops,
    /// The state file; only on rank 0.
    pub(crate) state: Option<StateFile>,
    pub(crate) saves: Saves,
    pub(crate) stored: StoredCheckpoints,
    pub(crate) profiler: Profiler,
    pub(crate) stragglers: Stragglers,
    pub(crate) gpu_health: GpuHealthReports,
    /// The last step whose state the ranks have compared; at first the step from which this start
    /// continued.
    pub(crate) compared: u64,
    /// Whether this start has done a step.
    pub(crate) has_trained: bool,
    /// Signals that this rank is alive, at each step.
    pub(crate) pulse: Pulse,
    /// The start phase, held until the first step is done if that step still belongs to the start.
    pub(crate) starting: Option<PhaseGuard>,
}

/// How a run ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All steps are done.
    Finished,
    /// The run was stopped before its last step, and is saved.
    Stopped(StopReason),
}

impl<T: RunTrainer> TrainLoop<'_, T> {
    /// Trains to the last step, or until the run is stopped.
    ///
    /// # Errors
    /// Any error that ends the run.
    /// # Collective
    /// All ranks.
    pub(crate) fn run(mut self) -> Result<Ended, TrainError> {
        self.stops.begin_training();
        let ended = match self.train() {
            Err(error) if error.is_shared() => self.keep_pending(error),
            ended => ended,
        };
        // Rank 0 still writes the run's state while the others wait.
        let ending = self.groups.world.phase(Phase::Save);
        if let Some(state) = &mut self.state {
            match &ended {
                Ok(Ended::Finished) => state.finished(),
                Ok(Ended::Stopped(reason)) => state.stopped(*reason),
                Err(error) => state.failed(error),
            }
        }
        if let (Err(error), Some(report)) = (&ended, self.report.take()) {
            report.failed(error);
        }
        if let Ok(Ended::Finished) = ended {
            self.trainer.core().finish_discarding(ending.progress());
        }
        if let Ok(Ended::Stopped(_)) = ended {
            // A launcher treats the first rank that exits with `train.stopped_exit_code` as the end
            // of the job.
            self.groups.world.barrier()?;
        }
        ended
    }

    fn train(&mut self) -> Result<Ended, TrainError> {
        let interval = self.config.train.eval_interval;
        let mut evaluated = self.evaluated()?;
        if !self.trainer.core().is_finished()
            && let Some(reason) = self.is_stopped()?
        {
            return self.stopped(reason);
        }
        while !self.trainer.core().is_finished() {
            // A checkpoint is saved before the evaluation of its step. If the run ended in between,
            // the evaluation is still missing, so it is done now.
            let step = self.trainer.core().progress().step;
            if self.trainer.evaluates() && due(step, interval) && evaluated != Some(step) {
                match self.evaluate()? {
                    ControlFlow::Continue(_) => evaluated = Some(step),
                    ControlFlow::Break(reason) => return self.stopped(reason),
                }
            }
            if let Some(reason) = self.step()? {
                return self.stopped(reason);
            }
        }
        self.save()?;
        let mut last = None;
        if self.trainer.evaluates() || self.trainer.tests() {
            let evals = match self.final_evaluations()? {
                ControlFlow::Continue(evals) => evals,
                ControlFlow::Break(reason) => return self.stopped(reason),
            };
            if let Some(report) = &mut self.report {
                report.eval(&evals)?;
            }
            last = evals
                .into_iter()
                .next()
                .filter(|_| self.trainer.evaluates());
        }
        self.finish_uploads()?;
        // The run is finished and saved; failures from here on do not change that.
        self.state.iter_mut().for_each(StateFile::finished);
        let warn = |error| tracing::warn!("cannot generate a sample: {error}");
        let sample = self.trainer.sample().map_err(warn).ok().flatten();
        let step = self.trainer.core().progress().step;
        if let Some(report) = self.report.take() {
            report.finish(step, last.as_ref(), sample.as_deref())?;
        }
        Ok(Ended::Finished)
    }

    /// Does one step, and saves a checkpoint if one is due. Returns the reason if the run stops
    /// after this step.
    fn step(&mut self) -> Result<Option<StopReason>, TrainError> {
        // The start has described its first step.
        if let Some(report) = self.report.as_mut().filter(|_| self.has_trained) {
            self.trainer.announce(report);
        }
        let core = self.trainer.core();
        let number = core.progress().step + 1;
        self.stragglers.begin_step(core.world());
        let stepping = self.profiler.step(number, core.world(), &core.device);
        let section = core.world().section("step");
        let tried = match self.trainer.try_step() {
            Err(error) => self.compute_again(error),
            done => done,
        };
        let metrics = match tried {
            Ok(metrics) => metrics,
            Err(error) => return Err(self.failed(error)),
        };
        drop((section, stepping));
        let core = self.trainer.core();
        self.stragglers.end_step(core.world(), &core.device);
        drop(self.starting.take());
        self.has_trained = true;
        self.pulse.beat();
        if let Some(report) = &mut self.report {
            report.step(&metrics)?;
            self.trainer.comment(&metrics, report);
            if let Some(layers) = self.trainer.core_mut().layer_statistics.take() {
                report.layers(metrics.step, layers)?;
            }
        }
        self.name_stragglers(metrics.step)?;
        self.roll_back()?;
        let train = &self.config.train;
        if due(metrics.step, train.check_replicas_interval) {
            self.compare_state()?;
        }
        let written = self.saves.advance(&self.trainer)?;
        self.record_saved(written)?;
        let uploaded = self.stored.advance(self.groups)?;
        self.record_uploaded(uploaded)?;
        let stop = self.is_stopped()?;
        if stop.is_some() {
            self.save()?;
        } else if self.saves.is_due(train, &self.trainer)? {
            self.save_at_interval()?;
        }
        self.profile(number, stop.is_some())?;
        Ok(stop)
    }

    /// Ends the profile if step `step` was its last one, or the run ends.
    fn profile(&mut self, step: u64, is_stopped: bool) -> Result<(), TrainError> {
        let core = self.trainer.core();
        let is_last = is_stopped || core.is_finished();
        let trace = self.profiler.finish(step, is_last, core.world())?;
        if let (Some(trace), Some(report)) = (trace, &mut self.report) {
            // The other ranks wait while rank 0 writes it.
            let _saving = self.groups.world.phase(Phase::Save);
            let layout = core.layout().to_string();
            report.profile(Trace { layout, ..trace })?;
        }
        Ok(())
    }

    /// Completes the pending checkpoint of a run that all ranks end because of `error`, unless it may
    /// hold wrong values.
    fn keep_pending(&mut self, error: TrainError) -> Result<Ended, TrainError> {
        if let Some(step) = error.suspect_step(self.compared) {
            self.set_aside_suspect(step);
        }
        let written = self.saves.finish(&self.trainer);
        if let Err(lost) = written.and_then(|written| self.record_saved(written)) {
            tracing::warn!("{lost}");
        }
        if let Err(lost) = self.finish_uploads() {
            tracing::warn!("{lost}");
        }
        Err(error)
    }

    /// Saves at an interval. With `train.async_save`, a save that is due while another is being
    /// written waits for it.
    fn save_at_interval(&mut self) -> Result<(), TrainError> {
        self.compare_before_save()?;
        let _part = self.trainer.core().part("save");
        let _saving = self.groups.world.phase(Phase::Save);
        let written = self.saves.finish(&self.trainer)?;
        self.record_saved(written)?;
        if !self.config.train.async_save || !self.saves.may_be_async() {
            return self.save();
        }
        if let Some(report) = &mut self.report {
            report.sync()?;
        }
        let uploading = self.stored.pending_steps();
        self.trainer.core_mut().set_uploading(uploading);
        self.saves.begin(&mut self.trainer)
    }

    /// Saves and waits until everything is on disk.
    fn save(&mut self) -> Result<(), TrainError> {
        self.compare_before_save()?;
        let written = {
            let _saving = self.groups.world.phase(Phase::Save);
            self.saves.finish(&self.trainer)?
        };
        self.record_saved(written)?;
        if self.saves.has(self.trainer.core().progress().step) {
            return Ok(());
        }
        // A rank may write longer than others, which wait for it.
        let _saving = self.groups.world.phase(Phase::Save);
        // Lines up to a checkpoint are never removed again, so they must be as durable as the
        // checkpoint.
        if let Some(report) = &mut self.report {
            report.sync()?;
        }
        let uploading = self.stored.pending_steps();
        self.trainer.core_mut().set_uploading(uploading);
        let saved = self.saves.save(&self.trainer)?;
        self.record_saved(Some(saved))
    }

    /// Records a checkpoint that was completed, if any.
    fn record_saved(&mut self, saved: Option<SavedCheckpoint>) -> Result<(), TrainError> {
        let Some(saved) = saved else { return Ok(()) };
        if let Some(state) = &mut self.state {
            state.saved(saved.step);
        }
        if let Some(report) = &mut self.report {
            report.saved(&saved, &self.trainer.core().checkpoint_path(saved.step))?;
        }
        self.stored
            .add(saved.step, self.trainer.core(), self.groups)
    }

    /// Records a checkpoint that was uploaded, if any.
    fn record_uploaded(&mut self, uploaded: Option<UploadedCheckpoint>) -> Result<(), TrainError> {
        match (&mut self.report, uploaded) {
            (Some(report), Some(uploaded)) => report.uploaded(&uploaded),
            _ => Ok(()),
        }
    }

    /// Waits until all checkpoints are uploaded; fails if the newest was not.
    fn finish_uploads(&mut self) -> Result<(), TrainError> {
        let _saving = self.groups.world.phase(Phase::Save);
        while self.stored.is_pending() {
            let uploaded = self.stored.finish_one(self.groups)?;
            self.record_uploaded(uploaded)?;
        }
        self.stored.check_last()
    }

    /// Why the run stops now, if any rank has a reason.
    fn is_stopped(&self) -> Result<Option<StopReason>, TrainError> {
        let should_give_up = self.report.as_ref().is_some_and(Reporter::should_give_up);
        let step = self.trainer.core().progress().step;
        self.stops
            .agree(self.groups, step, self.has_trained, should_give_up)
    }

    /// Evaluates and reports the result, or returns the reason if the run is stopped in the
    /// meantime.
    fn evaluate(&mut self) -> Result<Evaluated, TrainError> {
        let _part = self.trainer.core().part("evaluate");
        let _evaluating = self.groups.world.phase(Phase::Evaluate);
        let evals = self.unless_stopped(|stop| self.trainer.evaluate_unless(stop))?;
        if let (Some(report), ControlFlow::Continue(evals)) = (&mut self.report, &evals) {
            report.eval(evals)?;
            self.trainer.add_eval_losses(evals.clone());
        }
        Ok(evals)
    }

    /// The evaluations at the end of the run: on the validation data, then on the test data.
    fn final_evaluations(&self) -> Result<Evaluated, TrainError> {
        let _part = self.trainer.core().part("evaluate");
        let _evaluating = self.groups.world.phase(Phase::Evaluate);
        let evals = self.unless_stopped(|stop| self.trainer.evaluate_unless(stop))?;
        let ControlFlow::Continue(mut evals) = evals else {
            return Ok(evals);
        };
        let tests = self.unless_stopped(|stop| self.trainer.test_unless(stop))?;
        Ok(tests.map_continue(|tests| {
            evals.extend(tests);
            evals
        }))
    }

    fn unless_stopped(
        &self,
        evaluate: impl FnOnce(&mut StopCheck<'_>) -> Result<Option<Vec<EvalMetrics>>, TrainError>,
    ) -> Result<Evaluated, TrainError> {
        let mut reason = None;
        let evals = evaluate(&mut || {
            reason = self.is_stopped()?;
            Ok(reason.is_some())
        })?;
        Ok(match evals {
            Some(evals) => ControlFlow::Continue(evals),
            None => ControlFlow::Break(reason.expect("an evaluation ends early only for a reason")),
        })
    }

    /// The last step whose evaluations are all in the metrics.
    fn evaluated(&self) -> Result<Option<u64>, TrainError> {
        let names = self.trainer.valid_names();
        let report = self.report.as_ref();
        let mine = report.and_then(|report| report.evaluated(names.into_iter()));
        Ok(objects::broadcast(&self.groups.world, &mine)?)
    }

    fn stopped(&mut self, reason: StopReason) -> Result<Ended, TrainError> {
        let step = self.trainer.core().progress().step;
        // Before the first step there is nothing to save.
        if step > 0 {
            self.save()?;
        }
        self.finish_uploads()?;
        if let Some(report) = self.report.take() {
            // The other ranks wait while rank 0 writes the last lines of the metrics.
            let _saving = self.groups.world.phase(Phase::Save);
            report.stopped(step, reason)?;
        }
        Ok(Ended::Stopped(reason))
    }
}

/// The metrics of each data set, or why the run stopped in the meantime.
type Evaluated = ControlFlow<StopReason, Vec<EvalMetrics>>;

fn due(step: u64, interval: u64) -> bool {
    interval > 0 && step > 0 && step.is_multiple_of(interval)
}
