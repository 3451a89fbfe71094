//! Watches the ranks of one attempt and makes sure that they end together.

use std::{
    io,
    process::Child,
    sync::{
        PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, raise},
    unistd::Pid,
};

use crate::{
    agents::wire::FromCoordinator,
    child::{await_end, group_runs, signal, start},
    guard::Guard,
    job::Job,
    options::LaunchOptions,
    output::{LastWords, Pumps, Sink, Source},
    signals::StopRequests,
    verdict::{EndedBy, Outcome, RankEnd, exit_code_of_signal},
};

/// How long the other ranks may take to end by themselves after the first failure. They report what
/// they saw, and the rank that really failed may exit after one that was only notified of the
/// failure.
const SETTLE: Duration = Duration::from_secs(1);
/// Like [`SETTLE`], if the ranks stop with an exit code that means no failure; each may need time
/// to end.
const STOPPING: Duration = Duration::from_secs(10);
/// How often the launcher checks whether the other processes of a rank have ended, once its first
/// process was killed.
const LOOK: Duration = Duration::from_millis(100);

/// What a launcher waits for.
#[derive(Debug)]
pub(crate) enum Event {
    /// The first process of a rank ended, either killed by a signal or not.
    Ended {
        attempt: usize,
        local_rank: usize,
        killed: bool,
    },
    /// All other processes of its group have ended too. If the first was not killed, this follows
    /// at once.
    GroupEnded { attempt: usize, local_rank: usize },
    /// This process received a signal.
    Signal(i32),
    /// The coordinator of several hosts sent something, or is lost.
    Coordinator(FromCoordinator),
}

/// The process of a rank and its state.
struct RankProcess {
    rank: usize,
    child: Child,
    pid: Pid,
    last_words: LastWords,
    running: bool,
}

/// The ranks of one attempt.
pub(crate) struct Supervisor<'a> {
    attempt: usize,
    ranks: Vec<RankProcess>,
    ends: Vec<(usize, EndedBy, bool)>,
    options: &'a LaunchOptions,
    guard: Option<&'a mut Guard>,
    signal: Option<i32>,
    requests: StopRequests,
    plan: Plan,
    /// Whether the ranks were signalled to end.
    told: bool,
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
            message: None,
        }
    }

    /// Starts a rank.
    pub(crate) fn start(
        &mut self,
        local_rank: usize,
        job: &Job,
        events: &Sender<Event>,
        pumps: &mut Pumps,
    ) -> io::Result<()> {
        let attempt = self.attempt;
        let mut child = start(self.options, local_rank, attempt, job)?;
        let out = child.stdout.take();
        let err = child.stderr.take();
        let rank = self.options.node_rank * self.options.nproc + local_rank;
        let pid = Pid::from_raw(child.id().cast_signed());
        self.guard.iter_mut().for_each(|guard| guard.add(pid));
        let last_words = LastWords::default();
        let running = true;
        self.ranks.push(RankProcess {
            rank,
            child,
            pid,
            last_words: last_words.clone(),
            running,
        });
        let events = events.clone();
        thread::Builder::new()
            .name(format!("wait-{rank}"))
            .spawn(move || {
                let killed = await_end(pid);
                // Sending cannot fail: the launcher waits for every rank that it started.
                let _ = events.send(Event::Ended {
                    attempt,
                    local_rank,
                    killed,
                });
                while killed && group_runs(pid) {
                    thread::sleep(LOOK);
                }
                let _ = events.send(Event::GroupEnded {
                    attempt,
                    local_rank,
                });
            })?;
        let from = |sink| Source {
            rank,
            local_rank,
            sink,
        };
        pumps.start(from(Sink::Out), out.expect("stdout is piped"), None)?;
        pumps.start(
            from(Sink::Err),
            err.expect("stderr is piped"),
            Some(last_words),
        )
    }

    /// Returns when no rank is running that could still end.
    pub(crate) fn supervise(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(|rank| rank.running) {
            let event = match self.plan {
                Plan::Wait => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Plan::Terminate(at) | Plan::Kill(at) | Plan::GiveUp(at) => {
                    events.recv_timeout(at.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended {
                    attempt,
                    local_rank,
                    killed,
                }) if attempt == self.attempt => self.ended(local_rank, killed),
                Ok(Event::GroupEnded {
                    attempt,
                    local_rank,
                }) if attempt == self.attempt && self.ranks[local_rank].running => {
                    self.end(local_rank);
                }
                // Of a rank that has ended, or of the attempt before.
                Ok(Event::Ended { .. } | Event::GroupEnded { .. }) => {}
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
            FromCoordinator::EndRanks { .. } if self.plan == Plan::Wait => self.settle(),
            FromCoordinator::EndRanks { .. } | FromCoordinator::Beat => {}
            FromCoordinator::Signal { signal } => self.forward_signal(signal),
            other => {
                self.message = Some(other);
                self.settle();
            }
        }
    }

    /// A forwarded signal kills a shell at once while the program that it was waiting for is still
    /// saving. In that case the rank ends only when its whole group has ended.
    fn ended(&mut self, local_rank: usize, killed: bool) {
        let is_saving = killed && self.signal.is_some() && group_runs(self.ranks[local_rank].pid);
        if !is_saving {
            self.end(local_rank);
        }
    }

    /// Records the end of a rank, and kills the processes that it left running.
    fn end(&mut self, local_rank: usize) {
        let rank = &mut self.ranks[local_rank];
        signal(rank.pid, Signal::SIGKILL);
        // The group id stays valid until the rank is waited for.
        self.guard
            .iter_mut()
            .for_each(|guard| guard.remove(rank.pid));
        let by = match rank.child.wait() {
            Ok(status) => EndedBy::of(status),
            // The exit status was already collected elsewhere, so it is unknown and counts as a
            // failure.
            Err(_) => EndedBy::Code(1),
        };
        rank.running = false;
        self.ends.push((local_rank, by, self.told));
        if by != EndedBy::Code(0) && self.signal.map(EndedBy::Signal) != Some(by) {
            self.settle();
        }
    }

    /// Gives the other ranks time to end by themselves.
    fn settle(&mut self) {
        let settle = if exit_code_of_signal(self.ends.iter().map(|(_, by, _)| *by)).is_some() {
            STOPPING
        } else if self.signal.is_some() {
            // After a request to stop, the other ranks may still be saving.
            self.options.grace.max(SETTLE)
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

    /// Suspends the ranks and then this process; resumes the ranks when this process is resumed.
    fn suspend(&self) {
        self.signal_all(Signal::SIGSTOP);
        let _ = raise(Signal::SIGSTOP);
        self.signal_all(Signal::SIGCONT);
    }

    fn terminate(&mut self) {
        self.signal_all(Signal::SIGTERM);
        // A suspended rank handles SIGTERM only when it is resumed.
        self.signal_all(Signal::SIGCONT);
        self.told = true;
        self.plan = Plan::Kill(Instant::now() + self.options.grace);
    }

    /// Kills the ranks.
    pub(crate) fn kill(&mut self) {
        self.signal_all(Signal::SIGKILL);
        self.told = true;
        self.plan = Plan::GiveUp(Instant::now() + self.options.give_up);
    }

    /// Stops waiting for ranks that SIGKILL does not end.
    fn abandon(&mut self) {
        for (local_rank, rank) in self
            .ranks
            .iter_mut()
            .enumerate()
            .filter(|(_, rank)| rank.running)
        {
            rank.running = false;
            let by = EndedBy::Nothing {
                pid: rank.pid.as_raw(),
            };
            self.ends.push((local_rank, by, true));
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
        self.ranks
            .iter()
            .filter(|rank| rank.running)
            .for_each(|rank| signal(rank.pid, number));
    }

    /// How the ranks ended.
    pub(crate) fn into_outcome(self) -> Outcome {
        let Self {
            ranks,
            ends,
            signal,
            ..
        } = self;
        let end = |(local_rank, by, told): (usize, EndedBy, bool)| {
            let RankProcess {
                rank, last_words, ..
            } = &ranks[local_rank];
            let words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
            RankEnd {
                rank: *rank,
                by,
                told,
                last_words: words.iter().cloned().collect(),
            }
        };
        Outcome {
            ends: ends.into_iter().map(end).collect(),
            signal,
        }
    }
}

#[cfg(test)]
mod tests;
