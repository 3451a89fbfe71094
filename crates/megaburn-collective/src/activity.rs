//! The current activity of one rank, for the ranks that wait for it and for its supervisor.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    busy::{Busy, Phase, Place},
    clock,
    options::GroupOptions,
    section::Sections,
};

/// One rank's phases and signs of life. The rank's own threads write it; the threads that read its
/// connections answer questions from it while the rank is working.
#[derive(Debug)]
pub(crate) struct Activity {
    rank: usize,
    options: GroupOptions,
    state: Mutex<ActivityState>,
}

#[derive(Debug)]
struct ActivityState {
    /// The phases that the rank is in, the innermost last.
    phases: Vec<Current>,
    next_id: u64,
    /// The phase that was left last.
    last: Option<Current>,
    /// The last progress in a phase, or the end of the last phase.
    progress: Instant,
    /// The last sign of life of any kind.
    sign: Instant,
    /// The number of collectives in which the rank is waiting.
    waits: usize,
    sections: Sections,
    /// The ranks whose messages the rank waits for.
    awaited: Vec<usize>,
    /// What the rank did when its first collective failed.
    frozen: Option<Doing>,
}

/// What a rank does at a moment.
#[derive(Clone, Debug)]
pub(crate) struct Doing {
    /// The sections that it is in, the innermost last.
    pub(crate) sections: Vec<&'static str>,
    /// How long it is in the innermost.
    pub(crate) seconds: f64,
    /// The phases that it is in, the innermost last.
    pub(crate) phases: Vec<Phase>,
    /// The ranks whose messages it waits for.
    pub(crate) waits_for: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Current {
    id: u64,
    phase: Phase,
    done: u64,
    total: u64,
}

impl Activity {
    pub(crate) fn new(rank: usize, options: GroupOptions) -> Arc<Self> {
        let now = clock::now();
        let state = ActivityState {
            phases: Vec::new(),
            next_id: 0,
            last: None,
            progress: now,
            sign: now,
            waits: 0,
            sections: Sections::default(),
            awaited: Vec::new(),
            frozen: None,
        };
        Arc::new(Self {
            rank,
            options,
            state: Mutex::new(state),
        })
    }

    /// This rank's answer to a peer whose wait for it timed out. `None`: it is in no phase, so the
    /// limit of collectives applies.
    ///
    /// A rank that has just left a phase, or that waits for others within one, gets the time of a
    /// collective from then on: it was late for the collective that the others wait in because of
    /// the phase.
    pub(crate) fn busy(&self) -> Option<Busy> {
        let state = self.lock();
        let idle = clock::now().saturating_duration_since(state.progress);
        let current = state.phases.last();
        let Current {
            phase, done, total, ..
        } = current.or(state.last.as_ref())?;
        let place = match current {
            Some(_) if state.waits == 0 => Place::Inside,
            Some(_) => Place::Waiting,
            None => Place::Left,
        };
        let limit = match place {
            Place::Inside => self.limit_of(*phase, &state.phases),
            _ if idle < self.options.timeout => self.options.timeout,
            _ => return None,
        };
        let phase = *phase;
        let done = *done;
        let total = *total;
        Some(Busy {
            rank: self.rank,
            phase,
            place,
            done,
            total,
            idle,
            limit,
        })
    }

    /// The limit of the innermost of the phases that a rank is in. While a run starts, it is at least
    /// the limit of the start: the first samples, for instance, may take as long as the start.
    fn limit_of(&self, innermost: Phase, phases: &[Current]) -> Duration {
        let of = |phase| self.options.phases.of(phase);
        let is_start = |current: &Current| current.phase == Phase::Start;
        match phases.iter().any(is_start) {
            true => of(innermost).max(of(Phase::Start)),
            false => of(innermost),
        }
    }

    /// How long this rank has given no sign of life, and the limit of its phase; `None` while it
    /// waits in a collective, which has a limit of its own.
    pub(crate) fn quiet(&self) -> Option<Quiet> {
        let state = self.lock();
        let since = clock::now().saturating_duration_since(state.sign);
        let phase = state.phases.last().map(|current| current.phase);
        let limit = phase.map(|phase| self.limit_of(phase, &state.phases));
        (state.waits == 0).then_some(Quiet {
            since,
            phase,
            limit,
            section: state.sections.innermost(),
        })
    }

    /// Records that the rank has advanced by a micro-batch, a file or a collective. That is a sign
    /// of life, and progress of the phase that the rank is in, if any.
    pub(crate) fn advance(&self) {
        self.update(|state| state.touch());
    }

    pub(crate) fn enter(&self, phase: Phase) -> u64 {
        self.update(|state| {
            let id = state.next_id;
            state.next_id += 1;
            state.phases.push(Current {
                id,
                phase,
                done: 0,
                total: 0,
            });
            state.touch();
            id
        })
    }

    pub(crate) fn leave(&self, id: u64) {
        self.update(|state| {
            state.touch();
            if let Some(at) = state.phases.iter().position(|current| current.id == id) {
                state.last = Some(state.phases.remove(at));
            }
        });
    }

    /// Adds to the number of bytes to be done in a phase.
    pub(crate) fn expect(&self, id: u64, bytes: u64) {
        self.update_phase(id, |current| current.total += bytes);
    }

    /// Adds to the number of bytes done in a phase.
    pub(crate) fn progress(&self, id: u64, bytes: u64) {
        self.update_phase(id, |current| current.done += bytes);
    }

    fn update_phase(&self, id: u64, change: impl FnOnce(&mut Current)) {
        self.update(|state| {
            state.touch();
            if let Some(current) = state.phases.iter_mut().find(|current| current.id == id) {
                change(current);
            }
        });
    }

    /// Marks the rank as waiting in a collective until the returned guard is dropped.
    pub(crate) fn wait(&self) -> Wait<'_> {
        let since = self.update(|state| {
            state.touch();
            state.waits += 1;
            state.sign
        });
        Wait(self, since)
    }

    /// Records that the rank waits for a message of rank `peer`.
    pub(crate) fn await_rank(&self, peer: usize) {
        self.update(|state| state.awaited.push(peer));
    }

    /// Records that a wait for rank `peer` has ended.
    pub(crate) fn end_await(&self, peer: usize) {
        self.update(|state| {
            if let Some(at) = state.awaited.iter().position(|awaited| *awaited == peer) {
                state.awaited.swap_remove(at);
            }
        });
    }

    /// Keeps what the rank does now, because a collective has failed and the rank leaves what it
    /// does. The first failure counts.
    pub(crate) fn freeze(&self) {
        self.update(|state| {
            if state.frozen.is_none() {
                state.frozen = Some(state.doing());
            }
        });
    }

    /// What the rank does, or did when its first collective failed.
    pub(crate) fn doing(&self) -> Doing {
        let state = self.lock();
        state.frozen.clone().unwrap_or_else(|| state.doing())
    }

    pub(crate) fn enter_section(&self, name: &'static str) -> u64 {
        self.update(|state| state.sections.enter(name))
    }

    pub(crate) fn with_sections<T>(&self, change: impl FnOnce(&mut Sections) -> T) -> T {
        self.update(|state| change(&mut state.sections))
    }

    fn update<T>(&self, change: impl FnOnce(&mut ActivityState) -> T) -> T {
        change(&mut self.lock())
    }

    /// Ignores poisoning: a panic leaves every field consistent.
    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActivityState {
    fn doing(&self) -> Doing {
        let (sections, since) = self.sections.current();
        let since = since.map(|since| clock::now().saturating_duration_since(since));
        Doing {
            sections,
            seconds: since.unwrap_or_default().as_secs_f64(),
            phases: self.phases.iter().map(|current| current.phase).collect(),
            waits_for: self.awaited.clone(),
        }
    }

    fn touch(&mut self) {
        self.sign = clock::now();
        if !self.phases.is_empty() {
            self.progress = self.sign;
        }
    }
}

/// A collective in which a rank waits, and since when.
#[derive(Debug)]
pub(crate) struct Wait<'a>(&'a Activity, Instant);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.update(|state| {
            state.waits -= 1;
            state.touch();
            let time = state.sign.saturating_duration_since(self.1);
            state.sections.waited(time);
        });
    }
}

/// A rank without a sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quiet {
    /// The time since its last sign.
    pub since: Duration,
    /// The phase that it is in.
    pub phase: Option<Phase>,
    /// How long that phase may make no progress.
    pub limit: Option<Duration>,
    /// The section of its work that it is in.
    pub section: Option<&'static str>,
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn activity(timeout: u64) -> Arc<Activity> {
        let timeout = Duration::from_millis(timeout);
        Activity::new(
            3,
            GroupOptions {
                timeout,
                ..GroupOptions::default()
            },
        )
    }

    #[test]
    fn a_rank_answers_for_itself_in_a_phase_and_for_a_while_after_it() {
        let rank = activity(100);
        assert_eq!(rank.busy(), None);
        let id = rank.enter(Phase::Save);
        rank.expect(id, 10);
        rank.progress(id, 4);
        let busy = rank.busy().unwrap();
        assert_eq!(
            (busy.rank, busy.phase, busy.done, busy.total),
            (3, Phase::Save, 4, 10)
        );
        assert_eq!(busy.limit, GroupOptions::default().phases.save);
        rank.leave(id);
        assert_eq!(rank.busy().unwrap().limit, Duration::from_millis(100));
        thread::sleep(Duration::from_millis(120));
        assert_eq!(rank.busy(), None);
    }

    #[test]
    fn a_rank_that_waits_within_a_phase_has_the_time_of_a_collective() {
        let rank = activity(100);
        rank.enter(Phase::Load);
        let wait = rank.wait();
        assert_eq!(rank.quiet(), None);
        assert_eq!(rank.busy().unwrap().limit, Duration::from_millis(100));
        thread::sleep(Duration::from_millis(120));
        assert_eq!(rank.busy(), None, "the wait itself answers now");
        drop(wait);
        let busy = rank.busy().unwrap();
        assert!(busy.limit > Duration::from_secs(1) && busy.idle < Duration::from_millis(100));
        assert_eq!(rank.quiet().unwrap().phase, Some(Phase::Load));
    }

    /// A first step of many micro-batches belongs to the start phase, and each of them is progress.
    #[test]
    fn what_a_rank_finishes_is_a_sign_of_life_and_progress_of_its_phase() {
        let rank = activity(100);
        rank.enter(Phase::Start);
        thread::sleep(Duration::from_millis(120));
        rank.advance();
        let busy = rank.busy().unwrap();
        assert!(busy.idle < Duration::from_millis(100), "{busy:?}");
        assert!(rank.quiet().unwrap().since < Duration::from_millis(100));
    }

    #[test]
    fn phases_nest() {
        let rank = activity(100);
        let outer = rank.enter(Phase::Start);
        let inner = rank.enter(Phase::Load);
        assert_eq!(rank.busy().unwrap().phase, Phase::Load);
        rank.leave(inner);
        assert_eq!(rank.busy().unwrap().phase, Phase::Start);
        rank.leave(outer);
        assert_eq!(rank.busy().unwrap().phase, Phase::Start);
    }
}
