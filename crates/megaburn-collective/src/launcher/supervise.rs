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

use nix::{sys::signal::Signal, unistd::Pid};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};

use super::{
    Job, LaunchError, LaunchOptions,
    child::{await_end, signal, start},
    output::{LastWords, Pumps, Sink},
    verdict::{EndedBy, Outcome, RankEnd},
};

/// So long the others may end by themselves after the first failure: they say what they saw, and
/// the one that really failed may exit after one that was only told of it.
const SETTLE: Duration = Duration::from_secs(1);
/// Output that comes later than this after all ranks have ended is not waited for.
const DRAIN: Duration = Duration::from_secs(2);

enum Event {
    Ended { local_rank: usize },
    Signal(i32),
}

/// A rank's process and what is known of it.
struct Rank {
    rank: usize,
    child: Child,
    pid: Pid,
    last_words: LastWords,
    running: bool,
}

/// Starts the ranks, passes on their output, and returns when all have ended.
///
/// The first rank that fails ends all others: they have a second to end by themselves, as ranks do
/// that lose a peer, then they get SIGTERM, and after [`LaunchOptions::grace`] SIGKILL. SIGINT and
/// SIGTERM are passed on to the ranks, which may save and exit; who sends a second one has no
/// patience: then the grace begins. The cause of a failure is written to standard error as the last
/// thing, unless the caller does that. Standard input is empty for ranks.
///
/// Call it on a thread that lives until it returns (the main thread): ranks are tied to its life.
///
/// # Errors
/// Options that make no run; a rank that cannot be started.
pub fn launch(options: &LaunchOptions) -> Result<Outcome, LaunchError> {
    let job = options.job()?;
    let (sender, events) = channel();
    let signals = watch_signals(sender.clone()).map_err(LaunchError::Watch)?;
    let mut pumps = Pumps::new();
    let (ranks, ends) = (Vec::new(), Vec::new());
    let mut run = Run { ranks, ends, options, signal: None, plan: Plan::Wait, told: false };
    for local_rank in 0..options.nproc {
        if let Err(error) = run.start(local_rank, &job, &sender, &mut pumps) {
            let rank = options.node_rank * options.nproc + local_rank;
            run.kill();
            run.supervise(&events);
            return Err(LaunchError::Start { rank, error });
        }
    }
    run.supervise(&events);
    signals.close();
    pumps.finish(DRAIN);
    let outcome = run.into_outcome();
    if options.tells_cause && (outcome.cause().is_some() || outcome.signal.is_some()) {
        eprintln!("megaburn launch: {outcome}");
    }
    Ok(outcome)
}

fn watch_signals(events: Sender<Event>) -> io::Result<signal_hook::iterator::Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let handle = signals.handle();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for number in signals.forever() {
            if events.send(Event::Signal(number)).is_err() {
                return;
            }
        }
    })?;
    Ok(handle)
}

struct Run<'a> {
    ranks: Vec<Rank>,
    ends: Vec<(usize, EndedBy, bool)>,
    options: &'a LaunchOptions,
    signal: Option<i32>,
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
    Killed,
}

impl Run<'_> {
    fn start(
        &mut self,
        local_rank: usize,
        job: &Job,
        events: &Sender<Event>,
        pumps: &mut Pumps,
    ) -> io::Result<()> {
        let mut child = start(self.options, local_rank, job)?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let rank = self.options.node_rank * self.options.nproc + local_rank;
        let pid = Pid::from_raw(child.id().cast_signed());
        let last_words = LastWords::default();
        let running = true;
        self.ranks.push(Rank { rank, child, pid, last_words: last_words.clone(), running });
        let events = events.clone();
        thread::Builder::new().name(format!("wait-{rank}")).spawn(move || {
            await_end(pid);
            // The launcher waits for every rank that it started.
            let _ = events.send(Event::Ended { local_rank });
        })?;
        pumps.start(rank, out.expect("stdout is piped"), Sink::Out, None)?;
        pumps.start(rank, err.expect("stderr is piped"), Sink::Err, Some(last_words))
    }

    /// Returns when no rank runs.
    fn supervise(&mut self, events: &Receiver<Event>) {
        while self.ranks.iter().any(|rank| rank.running) {
            let event = match self.plan {
                Plan::Wait | Plan::Killed => {
                    events.recv().map_err(|_| RecvTimeoutError::Disconnected)
                }
                Plan::Terminate(at) | Plan::Kill(at) => {
                    events.recv_timeout(at.saturating_duration_since(Instant::now()))
                }
            };
            match event {
                Ok(Event::Ended { local_rank }) => self.ended(local_rank),
                Ok(Event::Signal(number)) => self.pass_on(number),
                Err(_) if matches!(self.plan, Plan::Terminate(_)) => self.terminate(),
                Err(_) => self.kill(),
            }
        }
    }

    /// Takes note of a rank that ended, and ends what it left behind.
    fn ended(&mut self, local_rank: usize) {
        let rank = &mut self.ranks[local_rank];
        signal(rank.pid, Signal::SIGKILL);
        let by = match rank.child.wait() {
            Ok(status) => EndedBy::of(status),
            // Somebody else took its status; how it ended is not known, so it is no success.
            Err(_) => EndedBy::Code(1),
        };
        rank.running = false;
        self.ends.push((local_rank, by, self.told));
        if self.plan == Plan::Wait && by != EndedBy::Code(0) {
            self.plan = Plan::Terminate(Instant::now() + SETTLE);
        }
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
        self.plan = Plan::Killed;
    }

    fn pass_on(&mut self, number: i32) {
        if let Ok(signal) = Signal::try_from(number) {
            self.signal_all(signal);
            self.signal_all(Signal::SIGCONT);
        }
        self.told = true;
        if self.signal.replace(number).is_some() && self.plan == Plan::Wait {
            self.plan = Plan::Kill(Instant::now() + self.options.grace);
        }
    }

    fn signal_all(&self, number: Signal) {
        self.ranks.iter().filter(|rank| rank.running).for_each(|rank| signal(rank.pid, number));
    }

    fn into_outcome(self) -> Outcome {
        let Self { ranks, ends, signal, .. } = self;
        let end = |(local_rank, by, told): (usize, EndedBy, bool)| {
            let Rank { rank, last_words, .. } = &ranks[local_rank];
            let words = last_words.lock().unwrap_or_else(PoisonError::into_inner);
            RankEnd { rank: *rank, by, told, last_words: words.iter().cloned().collect() }
        };
        Outcome { ends: ends.into_iter().map(end).collect(), signal }
    }
}
