//! Why and when a run stops before its last step.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use burn::tensor::TensorData;
use megaburn_collective::{ProcessGroups, ReduceOp};
use megaburn_launch::{Launched, LauncherRequests};
use signal_hook::low_level::signal_name;

use crate::{
    config::{TrainConfig, require},
    error::TrainError,
    signal::StopSignal,
};

/// Why a run stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A signal on any rank.
    Signal(i32),
    /// `train.exit_after_minutes` have passed.
    Time,
    /// `train.exit_at_step` is reached.
    Step,
    /// `metrics.jsonl` cannot be written any more.
    Metrics,
    /// The launcher restarts the ranks in place with another number of hosts.
    Regroup,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(number) => f.write_str(signal_name(*number).unwrap_or("a signal")),
            Self::Time => f.write_str("train.exit_after_minutes"),
            Self::Step => f.write_str("train.exit_at_step"),
            Self::Metrics => f.write_str("metrics that cannot be written"),
            Self::Regroup => f.write_str("a change of the number of hosts"),
        }
    }
}

/// The codes that ranks exchange to agree on a reason, next to the numbers of signals. The largest
/// wins.
const REGROUP: f64 = 0.5;
const TIME: f64 = 1000.0;
const STEP: f64 = 2000.0;
const METRICS: f64 = 3000.0;

impl StopReason {
    fn code(this: Option<Self>) -> f64 {
        match this {
            None => 0.0,
            Some(Self::Signal(number)) => f64::from(number),
            Some(Self::Time) => TIME,
            Some(Self::Step) => STEP,
            Some(Self::Metrics) => METRICS,
            Some(Self::Regroup) => REGROUP,
        }
    }

    fn of_code(code: f64) -> Option<Self> {
        match code {
            0.0 => None,
            TIME => Some(Self::Time),
            STEP => Some(Self::Step),
            METRICS => Some(Self::Metrics),
            REGROUP => Some(Self::Regroup),
            number => Some(Self::Signal(number as i32)),
        }
    }
}

/// When `megaburn launch` began, if this is a restart, which must not extend the time limit; else
/// now.
fn start_of_launch() -> Instant {
    let restarted = Launched::from_env().filter(|launched| launched.attempt > 0);
    let age = restarted.map(|launched| launched.launch.age());
    let now = Instant::now();
    now.checked_sub(age.unwrap_or_default()).unwrap_or(now)
}

/// The possible reasons to stop on this rank.
#[derive(Debug)]
pub(crate) struct Stops {
    signal: StopSignal,
    started: Instant,
    after: Option<Duration>,
    at_step: Option<u64>,
    /// The steps that were done when the ranks agreed last.
    steps: AtomicU64,
    /// What the launcher asks.
    requests: Arc<LauncherRequests>,
}

impl Stops {
    /// Starts the clock of `train.exit_after_minutes`.
    pub(crate) fn new(config: &TrainConfig, signal: StopSignal) -> Self {
        let minutes = config.train.exit_after_minutes;
        let step = config.train.exit_at_step;
        let after = (minutes > 0.0).then(|| Duration::try_from_secs_f64(60.0 * minutes));
        let after = after.map(|after| after.unwrap_or(Duration::MAX));
        // A run whose last step is `exit_at_step` is finished, not stopped.
        let at_step = (step > 0 && step < config.train.steps).then_some(step);
        Self {
            signal,
            started: start_of_launch(),
            after,
            at_step,
            steps: AtomicU64::new(0),
            requests: Arc::default(),
        }
    }

    /// Also stops when the launcher asks to regroup.
    pub(crate) fn set_requests(&mut self, requests: Arc<LauncherRequests>) {
        self.requests = requests;
    }

    /// What the launcher asks.
    pub(crate) fn requests(&self) -> Arc<LauncherRequests> {
        self.requests.clone()
    }

    /// The steps that were done when the ranks agreed last.
    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Whether a signal asked this rank to stop.
    pub(crate) fn is_signalled(&self) -> bool {
        self.signal.number().is_some()
    }

    /// From now on a signal ends the process, because there is nothing to save.
    pub(crate) fn end_training(&self) {
        self.signal.end_training();
    }

    /// From now on a first signal asks the run to save and stop.
    pub(crate) fn begin_training(&self) {
        self.signal.begin_training();
    }

    /// Refuses to continue after `train.exit_at_step`: otherwise a supervisor that restarts stopped
    /// runs would do so forever.
    ///
    /// # Errors
    /// The run has already done `train.exit_at_step` steps.
    pub(crate) fn check_start(&self, step: u64) -> Result<(), TrainError> {
        match self.at_step {
            Some(at) => {
                let rule =
                    format!("more than {step}, the steps that are done, or 0 to train to the end");
                require(step < at, "train.exit_at_step", at, rule)
            }
            None => Ok(()),
        }
    }

    /// Why this rank would stop after `step` steps. The time limit does not stop a start that has
    /// not trained a step yet: otherwise one that takes long to start would never make progress.
    fn reason(&self, step: u64, has_trained: bool) -> Option<StopReason> {
        if self.at_step.is_some_and(|at| step >= at) {
            return Some(StopReason::Step);
        }
        if has_trained
            && self
                .after
                .is_some_and(|after| self.started.elapsed() >= after)
        {
            return Some(StopReason::Time);
        }
        let signal = self.signal.number().map(StopReason::Signal);
        let regroups = has_trained && self.requests.regroup();
        signal.or_else(|| regroups.then_some(StopReason::Regroup))
    }

    /// Why all ranks stop after `step` steps, if any rank has a reason; they leave the loop
    /// together. `has_trained` says that this start has trained at least one step, `should_give_up`
    /// that this rank cannot write its metrics.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks.
    pub(crate) fn agree(
        &self,
        groups: &ProcessGroups,
        step: u64,
        has_trained: bool,
        should_give_up: bool,
    ) -> Result<Option<StopReason>, TrainError> {
        let reason = if should_give_up {
            Some(StopReason::Metrics)
        } else {
            self.reason(step, has_trained)
        };
        let mine = TensorData::from([StopReason::code(reason)]);
        let largest = groups.world.all_reduce(mine, ReduceOp::Max)?;
        self.steps.store(step, Ordering::Relaxed);
        let codes: Vec<f64> = largest.try_to_vec().expect("the tensor is f64");
        Ok(StopReason::of_code(codes[0]))
    }
}

#[cfg(test)]
mod tests {
    use megaburn_collective::{GroupOptions, run_threads};
    use megaburn_mesh::Layout;

    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    fn stops(text: &str) -> Stops {
        let layers = ConfigLayers::new().with_text("stop.rs", text).unwrap();
        Stops::new(&layers.load().unwrap(), StopSignal::never())
    }

    #[test]
    fn a_run_stops_at_its_step_or_time_and_else_goes_on() {
        let step = stops("train.exit_at_step = 7");
        assert_eq!(
            [6, 7, 8].map(|at| step.reason(at, true)),
            [None, Some(StopReason::Step), Some(StopReason::Step)]
        );
        step.check_start(6).unwrap();
        for done in [7, 8] {
            let error = step.check_start(done).unwrap_err();
            let message =
                format!("`train.exit_at_step` is 7: it must be more than {done}, the steps");
            assert!(error.to_string().starts_with(&message), "{error}");
            assert_eq!(error.exit(), Exit::BadInput);
        }
        let time = stops("train.exit_after_minutes = 0.0005");
        assert_eq!(time.reason(1, true), None);
        std::thread::sleep(Duration::from_millis(35));
        assert_eq!(time.reason(1, true), Some(StopReason::Time));
        assert_eq!(time.reason(1, false), None, "it has made no step");
        assert_eq!(stops("").reason(u64::MAX, true), None);
    }

    #[test]
    fn ranks_regroup_after_a_step_unless_they_are_asked_to_stop() {
        let stops = stops("");
        stops.requests().ask_to_regroup();
        assert_eq!(stops.reason(3, false), None);
        assert_eq!(stops.reason(3, true), Some(StopReason::Regroup));
        let codes = [StopReason::Regroup, StopReason::Signal(1)].map(Some);
        assert_eq!(
            codes.map(|reason| StopReason::of_code(StopReason::code(reason))),
            codes
        );
        assert!(StopReason::code(codes[0]) < StopReason::code(codes[1]));
    }

    #[test]
    fn one_rank_with_a_reason_stops_all_for_it() {
        let layout: Layout = "dp2".parse().unwrap();
        let ranks = run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let mine = if world.rank() == 1 {
                "train.exit_at_step = 3"
            } else {
                ""
            };
            let stops = stops(mine);
            let agreed = (
                stops.agree(&groups, 2, true, false)?,
                stops.agree(&groups, 3, true, false)?,
            );
            Ok::<_, TrainError>(agreed)
        });
        for rank in ranks {
            assert_eq!(rank.unwrap(), (None, Some(StopReason::Step)));
        }
        assert_eq!(
            StopReason::of_code(StopReason::code(Some(StopReason::Signal(10))))
                .unwrap()
                .to_string(),
            "SIGUSR1"
        );
    }
}
