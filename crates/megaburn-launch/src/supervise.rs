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
/// How long the launcher waits for further output after all ranks have ended.
const DRAIN: Duration = Duration::from_secs(2);

enum Event {
    /// The first process of a rank ended, either killed by a signal or not.
    Ended {
        local_rank: usize,
        killed: bool,
    },
    /// All other processes of its group have ended too. If the first was not killed, this follows
    /// at once.
    GroupEnded {
        local_rank: usize,
    },
    Signal(i32),
}

/// The process of a rank and its state.
struct RankProcess {
    rank: usize,
    child: Child,
    pid: Pid,
    last_words: LastWords,
    running: bool,
}

/// Starts the ranks, passes on their output, and returns when all have ended.
///
/// The first rank that fails ends all others:
///
/// - They get a second to end by themselves, as ranks that lose a peer do.
/// - Then they get SIGTERM, and after [`LaunchOptions::grace`] SIGKILL.
/// - A rank that has not ended [`LaunchOptions::give_up`] after that is abandoned and named.
///
/// The signals of [`stop_signals`](super::stop_signals) are forwarded to the ranks, which may save
/// and exit. Such a signal kills a shell that started a rank's program, but the program may still
/// save. Signals within a second of the first are the same request; a later one is forwarded too
/// and starts the grace period. Ctrl-Z (SIGTSTP) suspends the ranks together with the launcher.
///
/// The cause of a failure is written to standard error last, unless the caller does that. The
/// ranks' standard input is empty.
///
/// Call this on a thread that lives until it returns (the main thread), because the ranks are tied
/// to the life of that thread.
///
/// # Errors
/// The options are invalid, the command does not exist, or a rank cannot be started.
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
    /// Whether the ranks were signalled to end.
    told: bool,
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
                // Sending cannot fail: the launcher waits for every rank that it started.
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

    /// Returns when no rank is running that could still end.
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

    fn kill(&mut self) {
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
mod tests;
