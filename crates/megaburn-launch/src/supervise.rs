//! Watches the ranks of one attempt and makes sure that they end together.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use nix::sys::signal::{Signal, raise};

use crate::{
    agents::wire::FromCoordinator,
    child::{group_runs, signal},
    event::Event,
    guard::Guard,
    in_place::{FromRank, WaitReason},
    options::LaunchOptions,
    rank_process::{RankProcess, Standing},
    signals::StopRequests,
    stacks,
    verdict::{EndedBy, Outcome, RankEnd, exit_code_of_signal},
};

/// How long the other ranks may take to end by themselves after the first failure. They report what
/// they saw, and the rank that really failed may exit after one that was only notified of the
/// failure.
const SETTLE: Duration = Duration::from_secs(1);
/// Like [`SETTLE`], if the ranks stop with an exit code that means no failure; each may need time
/// to end.
const STOPPING: Duration = Duration::from_secs(10);
/// Like [`SETTLE`], if a rank that runs waits for a restart once it has noticed the failure and closed
/// its groups. If a rank hangs, all others wait for it, so the one that does not leave its groups
/// within [`SETTLE`] is usually the rank that hangs.
const LEAVING: Duration = Duration::from_secs(10);

/// The ranks of one attempt.
pub(crate) struct Supervisor<'a> {
    attempt: usize,
    pub(crate) ranks: Vec<RankProcess>,
    /// By place in `ranks`: how it ended, or that it waits; and whether it was signalled before.
    ends: Vec<(usize, EndedBy, bool)>,
    options: &'a LaunchOptions,
    guard: Option<&'a mut Guard>,
    signal: Option<i32>,
    requests: StopRequests,
    plan: Plan,
    /// Whether the ranks were signalled to end.
    told: bool,
    /// Whether ranks that wait for a restart say that a rank hangs.
    hangs: bool,
    /// What the coordinator of several hosts sent that is not about these ranks.
    pub(crate) message: Option<FromCoordinator>,
}

/// The next action on ranks that still run, and its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Wait,
    Terminate(Instant),
    Kill(Instant),
    GiveUp(Instant),
}

impl<'a> Supervisor<'a> {
    pub(crate) fn new(
        options: &'a LaunchOptions,
        attempt: usize,
        guard: Option<&'a mut Guard>,
    ) -> Self {
        let (ranks, ends, requests) = Default::default();
        Self {
            attempt,
            ranks,
            ends,
            options,
            guard,
            signal: None,
            requests,
            plan: Plan::Wait,
            told: false,
            hangs: false,
            message: None,
        }
    }

    /// Adds a rank that was started, or restarted in place.
    pub(crate) fn add(&mut self, process: RankProcess) {
        self.ranks.push(process);
    }

    /// Adds a rank that was started.
    pub(crate) fn add_started(&mut self, process: RankProcess) {
        let pid = process.pid;
        self.guard.iter_mut().for_each(|guard| guard.add(pid));
        self.add(process);
    }

    /// Returns when each rank has ended, or waits for a restart.
    pub(crate) fn supervise(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(RankProcess::is_running) {
            let event = match self.plan {
                Plan::Wait => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Plan::Terminate(at) | Plan::Kill(at) | Plan::GiveUp(at) => {
                    events.recv_timeout(at.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended { serial, killed }) => self.ended(serial, killed),
                Ok(Event::GroupEnded { serial }) => {
                    if let Some(at) = self.place_of(serial) {
                        self.end(at);
                    }
                }
                Ok(Event::Said { serial, said }) => self.hear(serial, &said),
                Ok(Event::Coordinator(message)) => self.obey(message),
                Ok(Event::Signal(number)) if number == Signal::SIGTSTP as i32 => self.suspend(),
                Ok(Event::Signal(number)) => self.forward_signal(number),
                Err(_) => match self.plan {
                    Plan::Terminate(_) => self.terminate(),
                    Plan::GiveUp(_) => return self.abandon(),
                    Plan::Wait | Plan::Kill(_) => self.kill(),
                },
            }
        }
    }

    /// Ends the ranks if the coordinator says so, or is lost.
    fn obey(&mut self, message: FromCoordinator) {
        match message {
            FromCoordinator::EndRanks { attempt } if attempt != self.attempt => {}
            FromCoordinator::EndRanks { .. } if self.plan == Plan::Wait => {
                self.ranks.iter().for_each(RankProcess::leave);
                self.settle();
            }
            FromCoordinator::EndRanks { .. } | FromCoordinator::LeftOut | FromCoordinator::Beat => {
            }
            FromCoordinator::Regroup { attempt } if attempt == self.attempt => {
                self.ranks.iter().for_each(RankProcess::regroup);
            }
            FromCoordinator::Regroup { .. } => {}
            FromCoordinator::Signal { signal } => self.forward_signal(signal),
            other => {
                self.message = Some(other);
                self.settle();
            }
        }
    }

    /// The place of a process among the ranks; `None` if it has ended, or is of the attempt before.
    fn place_of(&self, serial: usize) -> Option<usize> {
        let is_it = |rank: &RankProcess| rank.serial == serial && !rank.has_ended();
        self.ranks.iter().position(is_it)
    }

    /// A forwarded signal kills a shell at once while the program that it was waiting for is still
    /// saving. In that case the rank ends only when its whole group has ended.
    fn ended(&mut self, serial: usize, killed: bool) {
        let Some(at) = self.place_of(serial) else {
            return;
        };
        let is_saving = killed && self.signal.is_some() && group_runs(self.ranks[at].pid);
        if !is_saving {
            self.end(at);
        }
    }

    /// Records the end of the rank at this place.
    pub(crate) fn end(&mut self, at: usize) {
        let rank = &mut self.ranks[at];
        // The group id stays valid until the rank is waited for.
        self.guard
            .iter_mut()
            .for_each(|guard| guard.remove(rank.pid));
        let by = rank.end();
        self.ends.retain(|(waits, ..)| *waits != at);
        self.ends.push((at, by, self.told));
        if by != EndedBy::Code(0) && self.signal.map(EndedBy::Signal) != Some(by) {
            self.settle();
        }
    }

    /// Takes note of what a rank said. One that waits for a restart has lost a peer.
    fn hear(&mut self, serial: usize, said: &FromRank) {
        let Some(at) = self.place_of(serial) else {
            return;
        };
        let waits = matches!(said, FromRank::Waits(_));
        self.hangs |= matches!(
            said,
            FromRank::Waits(WaitReason::LostPeer { hangs: true, .. })
        );
        // A rank that was signalled ends.
        if waits && self.told {
            return;
        }
        self.ranks[at].hear(said);
        if waits {
            self.ends.push((at, EndedBy::LostPeer, self.told));
            self.settle();
        }
    }

    /// Gives the other ranks time to end by themselves.
    pub(crate) fn settle(&mut self) {
        let settle = if exit_code_of_signal(self.ends.iter().map(|(_, by, _)| *by)).is_some() {
            STOPPING
        } else if self.signal.is_some() {
            // After a request to stop, the other ranks may still be saving.
            self.options.grace.max(SETTLE)
        } else if self.is_one_enrolled() && !self.hangs {
            LEAVING
        } else {
            SETTLE
        };
        let until = Instant::now() + settle;
        match self.plan {
            Plan::Wait => self.plan = Plan::Terminate(until),
            Plan::Terminate(at) => self.plan = Plan::Terminate(at.min(until)),
            Plan::Kill(_) | Plan::GiveUp(_) => {}
        }
    }

    /// Whether a rank runs that is to wait for a restart.
    fn is_one_enrolled(&self) -> bool {
        let mut ranks = self.ranks.iter();
        ranks.any(|rank| rank.standing == Standing::Enrolled)
    }

    /// Suspends the ranks and then this process; resumes the ranks when this process is resumed.
    fn suspend(&self) {
        self.signal_all(Signal::SIGSTOP);
        let _ = raise(Signal::SIGSTOP);
        self.signal_all(Signal::SIGCONT);
    }

    /// Asks the ranks to end that have neither ended nor wait for a restart.
    fn terminate(&mut self) {
        self.write_stacks();
        self.signal_running(Signal::SIGTERM);
        // A suspended rank handles SIGTERM only when it is resumed.
        self.signal_running(Signal::SIGCONT);
        self.told = true;
        self.plan = Plan::Kill(Instant::now() + self.options.grace);
    }

    /// Writes the stacks of ranks that hang: the ones that still run after all others lost a peer.
    fn write_stacks(&self) {
        let hangs = self.ends.iter().all(|(_, by, _)| by.is_echo());
        if !self.options.hang_stacks || !hangs || self.ends.is_empty() || self.signal.is_some() {
            return;
        }
        for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
            stacks::write(rank.rank(), rank.pid, self.options.log_dir.as_deref());
        }
    }

    /// Kills these ranks.
    pub(crate) fn kill(&mut self) {
        self.signal_running(Signal::SIGKILL);
        self.told = true;
        self.plan = Plan::GiveUp(Instant::now() + self.options.give_up);
    }

    /// Stops waiting for ranks that SIGKILL does not end.
    fn abandon(&mut self) {
        let ranks = self.ranks.iter_mut().enumerate();
        for (at, rank) in ranks.filter(|(_, rank)| rank.is_running()) {
            rank.standing = Standing::Ended;
            let by = EndedBy::Nothing {
                pid: rank.pid.as_raw(),
            };
            self.ends.push((at, by, true));
        }
    }

    fn forward_signal(&mut self, number: i32) {
        let is_first = !self.requests.is_requested();
        let is_repeated = self.requests.is_repeated(Instant::now());
        if !is_first && !is_repeated {
            return;
        }
        if let Ok(signal) = Signal::try_from(number) {
            self.signal_all(signal);
            self.signal_all(Signal::SIGCONT);
        }
        self.told = true;
        self.signal = Some(number);
        if is_repeated && self.plan == Plan::Wait {
            self.plan = Plan::Kill(Instant::now() + self.options.grace);
        }
    }

    fn signal_all(&self, number: Signal) {
        let runs = |rank: &&RankProcess| !rank.has_ended();
        let ranks = self.ranks.iter().filter(runs);
        ranks.for_each(|rank| signal(rank.pid, number));
    }

    fn signal_running(&self, number: Signal) {
        let ranks = self.ranks.iter().filter(|rank| rank.is_running());
        ranks.for_each(|rank| signal(rank.pid, number));
    }

    /// How the ranks ended, and those that wait for a restart.
    pub(crate) fn into_outcome(self) -> (Outcome, Vec<RankProcess>) {
        let Self {
            ranks,
            ends,
            signal,
            ..
        } = self;
        let end = |(at, by, told): (usize, EndedBy, bool)| RankEnd {
            rank: ranks[at].rank(),
            by,
            told,
            last_words: ranks[at].last_words(),
        };
        let outcome = Outcome {
            ends: ends.into_iter().map(end).collect(),
            signal,
        };
        let waiting = ranks.into_iter().filter(RankProcess::is_waiting);
        (outcome, waiting.collect())
    }
}

#[cfg(test)]
mod tests;
