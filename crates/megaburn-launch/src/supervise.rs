use std::{
    io,
    process::Child,
    sync::{
        PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, raise},
    unistd::Pid,
};
use signal_hook::iterator::Signals;

use crate::{
    Job, LaunchError, LaunchOptions,
    child::{await_end, group_runs, signal, start},
    command,
    guard::Guard,
    logs::Logs,
    output::{LastWords, Pumps, Sink, Source, Streams},
    signals::{StopRequests, passed_on},
    verdict::{EndedBy, Outcome, RankEnd, exit_code_of_signal},
};

/// So long the others may end by themselves after the first failure: they say what they saw, and
/// the one that really failed may exit after one that was only told of it.
const SETTLE: Duration = Duration::from_secs(1);
/// The same, where the ranks stop with an exit code that means no failure: each takes its time to end.
const STOPPING: Duration = Duration::from_secs(10);
/// How often the launcher checks whether the other processes of a rank have ended once its first was killed.
const LOOK: Duration = Duration::from_millis(100);
/// Output that comes later than this after all ranks have ended is not waited for.
const DRAIN: Duration = Duration::from_secs(2);

enum Event {
    /// The first process of a rank ended, killed by a signal or not.
    Ended {
        local_rank: usize,
        killed: bool,
    },
    /// So have all others of its group, if it was killed.
    GroupEnded {
        local_rank: usize,
    },
    Signal(i32),
}

/// A rank's process and what is known of it.
struct RankProcess {
    rank: usize,
    child: Child,
    pid: Pid,
    last_words: LastWords,
    running: bool,
}

/// Starts the ranks, passes on their output, and returns when all have ended.
///
/// The first rank that fails ends all others: they have a second to end by themselves, as ranks do
/// that lose a peer, then they get SIGTERM, and after [`LaunchOptions::grace`] SIGKILL; a rank that does
/// not end [`LaunchOptions::give_up`] after that is left behind, by name. The signals of
/// [`stop_signals`](super::stop_signals) are passed on to the ranks, which may save and exit. They kill
/// a shell that a rank's program was started by, and the program may save all the same. Signals within a
/// second of the first are the same request; a later one is passed on too, and then the grace begins.
/// Ctrl-Z (SIGTSTP) suspends the ranks with the launcher. The cause of
/// a failure is written to standard error as the last thing, unless the caller does that. Standard
/// input is empty for ranks.
///
/// Call it on a thread that lives until it returns (the main thread): ranks are tied to its life.
///
/// # Errors
/// Options that make no run; a command that does not exist; a rank that cannot be started.
pub fn launch(options: &LaunchOptions) -> Result<Outcome, LaunchError> {
    let job = options.job()?;
    command::check(&options.command[0])?;
    let streams = Streams::new().map_err(LaunchError::Watch)?;
    let first = options.node_rank * options.nproc;
    let open = |dir| Logs::open(dir, first..first + options.nproc, streams.errors());
    let logs = options
        .log_dir
        .as_deref()
        .map(open)
        .transpose()
        .map_err(LaunchError::Logs)?;
    let guard = options.entry.as_deref().map(Guard::start).transpose();
    let guard = guard.map_err(LaunchError::Watch)?;
    let (sender, events) = channel();
    let signals = watch_signals(sender.clone()).map_err(LaunchError::Watch)?;
    let mut pumps = Pumps::new(streams.with_logs(logs));
    let mut run = Supervisor::new(options, guard);
    for local_rank in 0..options.nproc {
        if let Err(error) = run.start(local_rank, &job, &sender, &mut pumps) {
            run.kill();
            run.supervise(&events);
            return Err(LaunchError::Start {
                rank: first + local_rank,
                error,
            });
        }
    }
    run.supervise(&events);
    signals.close();
    pumps.finish(DRAIN);
    let outcome = run.into_outcome();
    pumps.streams.report_repeats();
    if options.reports_cause && (outcome.cause().is_some() || outcome.signal.is_some()) {
        pumps.streams.say(&format!("megaburn launch: {outcome}"));
    }
    pumps.streams.flush();
    Ok(outcome)
}

fn watch_signals(events: Sender<Event>) -> io::Result<signal_hook::iterator::Handle> {
    let mut signals = Signals::new(passed_on())?;
    let handle = signals.handle();
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for number in signals.forever() {
                if events.send(Event::Signal(number)).is_err() {
                    return;
                }
            }
        })?;
    Ok(handle)
}

struct Supervisor<'a> {
    ranks: Vec<RankProcess>,
    ends: Vec<(usize, EndedBy, bool)>,
    options: &'a LaunchOptions,
    guard: Option<Guard>,
    signal: Option<i32>,
    requests: StopRequests,
    plan: Plan,
    /// Whether the ranks were told to end.
    told: bool,
}

/// What is to be done, and when, to ranks that still run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    Wait,
    Terminate(Instant),
    Kill(Instant),
    GiveUp(Instant),
}

impl<'a> Supervisor<'a> {
    fn new(options: &'a LaunchOptions, guard: Option<Guard>) -> Self {
        let (ranks, ends, requests) = Default::default();
        Self {
            ranks,
            ends,
            options,
            guard,
            signal: None,
            requests,
            plan: Plan::Wait,
            told: false,
        }
    }

    fn start(
        &mut self,
        local_rank: usize,
        job: &Job,
        events: &Sender<Event>,
        pumps: &mut Pumps,
    ) -> io::Result<()> {
        let mut child = start(self.options, local_rank, job)?;
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
                // The launcher waits for every rank that it started.
                let _ = events.send(Event::Ended { local_rank, killed });
                while killed && group_runs(pid) {
                    thread::sleep(LOOK);
                }
                let _ = events.send(Event::GroupEnded { local_rank });
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

    /// Returns when no rank runs that could still end.
    fn supervise(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(|rank| rank.running) {
            let event = match self.plan {
                Plan::Wait => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Plan::Terminate(at) | Plan::Kill(at) | Plan::GiveUp(at) => {
                    events.recv_timeout(at.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended { local_rank, killed }) => self.ended(local_rank, killed),
                Ok(Event::GroupEnded { local_rank }) if self.ranks[local_rank].running => {
                    self.end(local_rank);
                }
                Ok(Event::GroupEnded { .. }) => {}
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

    /// A signal that was passed on kills a shell at once, while the program that it waited for saves:
    /// the rank has ended when that has.
    fn ended(&mut self, local_rank: usize, killed: bool) {
        let is_saving = killed && self.signal.is_some() && group_runs(self.ranks[local_rank].pid);
        if !is_saving {
            self.end(local_rank);
        }
    }

    /// Takes note of a rank that ended, and ends what it left behind.
    fn end(&mut self, local_rank: usize) {
        let rank = &mut self.ranks[local_rank];
        signal(rank.pid, Signal::SIGKILL);
        // Its number means this group until it is waited for.
        self.guard
            .iter_mut()
            .for_each(|guard| guard.remove(rank.pid));
        let by = match rank.child.wait() {
            Ok(status) => EndedBy::of(status),
            // Somebody else took its status; how it ended is not known, so it is no success.
            Err(_) => EndedBy::Code(1),
        };
        rank.running = false;
        self.ends.push((local_rank, by, self.told));
        if by != EndedBy::Code(0) && self.signal.map(EndedBy::Signal) != Some(by) {
            self.settle();
        }
    }

    /// Gives the others time to end by themselves.
    fn settle(&mut self) {
        let settle = if exit_code_of_signal(self.ends.iter().map(|(_, by, _)| *by)).is_some() {
            STOPPING
        } else if self.signal.is_some() {
            // After a request to stop the others are busy with it.
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

    /// Suspends the ranks with this process, and continues them when it is continued.
    fn suspend(&self) {
        self.signal_all(Signal::SIGSTOP);
        let _ = raise(Signal::SIGSTOP);
        self.signal_all(Signal::SIGCONT);
    }

    fn terminate(&mut self) {
        self.signal_all(Signal::SIGTERM);
        // A stopped rank hears it only when it goes on.
        self.signal_all(Signal::SIGCONT);
        self.told = true;
        self.plan = Plan::Kill(Instant::now() + self.options.grace);
    }

    fn kill(&mut self) {
        self.signal_all(Signal::SIGKILL);
        self.told = true;
        self.plan = Plan::GiveUp(Instant::now() + self.options.give_up);
    }

    /// Gives up waiting for ranks that SIGKILL does not end.
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

    fn into_outcome(self) -> Outcome {
        let Self {
            ranks,
            ends,
            signal,
            guard,
            ..
        } = self;
        drop(guard);
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
#[path = "supervise_tests.rs"]
mod tests;
