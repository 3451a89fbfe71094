//! The fastest of the runs that fit.
//!
//! Runs are simulated in the order of their least times, until the next one could not be among the
//! fastest.

use std::collections::HashMap;

use megaburn_train::TrainConfig;

use crate::{
    candidates::Candidate,
    error::PlanError,
    fitting::Run,
    trial::{Cut, Trials},
};

/// The fastest run of each candidate that was simulated, the fastest first. The first `most` are
/// the fastest of all.
pub(crate) fn of(
    config: &TrainConfig,
    candidates: &[Candidate],
    mut runs: Vec<Run>,
    trials: &Trials,
    most: usize,
) -> Result<Vec<Run>, PlanError> {
    // In a stable order: runs that take equally long stay in the order of the candidates.
    runs.sort_by(|one, other| one.least_ms.total_cmp(&other.least_ms));
    let mut fastest: HashMap<usize, (f64, Run)> = HashMap::new();
    let mut limit = Limit::new(most);
    for run in runs {
        if limit.excludes(run.least_ms) {
            break;
        }
        let ms = match trials.time(
            &run.config(config, candidates),
            candidates[run.candidate].layout,
        ) {
            Ok(trial) => trial.step_ms,
            Err(Cut::Refused(error)) => return Err(error),
            // It has fitted before.
            Err(Cut::DoesNotFit) => continue,
        };
        let known = fastest.entry(run.candidate).or_insert((f64::INFINITY, run));
        if ms < known.0 {
            limit.replace(known.0, ms);
            *known = (ms, run);
        }
    }
    let mut all: Vec<_> = fastest.into_values().collect();
    all.sort_by(|(one, of_one), (other, of_other)| {
        let order = one.total_cmp(other);
        order.then(of_one.candidate.cmp(&of_other.candidate))
    });
    Ok(all.into_iter().map(|(_, run)| run).collect())
}

/// The time that a run must not exceed to be among the fastest.
struct Limit {
    most: usize,
    /// The fastest time of each candidate, in order.
    times: Vec<f64>,
}

impl Limit {
    fn new(most: usize) -> Self {
        Self {
            most,
            times: Vec::new(),
        }
    }

    /// Adds the time of a candidate, whose time was `before` if it was among these.
    fn replace(&mut self, before: f64, ms: f64) {
        if let Some(at) = self.times.iter().position(|time| *time == before) {
            self.times.remove(at);
        }
        let at = self.times.partition_point(|time| *time < ms);
        self.times.insert(at, ms);
    }

    fn excludes(&self, ms: f64) -> bool {
        let last = self.most.checked_sub(1).and_then(|at| self.times.get(at));
        last.is_some_and(|last| ms > *last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_exceeds_the_fastest_of_as_many_candidates_is_excluded() {
        let mut limit = Limit::new(2);
        limit.replace(f64::INFINITY, 3.0);
        assert!(!limit.excludes(9.0));
        limit.replace(f64::INFINITY, 5.0);
        assert!(limit.excludes(5.5) && !limit.excludes(5.0));
        // One of both candidates is faster with other settings.
        limit.replace(5.0, 4.0);
        assert!(limit.excludes(4.5) && !limit.excludes(4.0));
    }
}
