//! The launcher of one host: it starts the ranks, and starts them again after a failure.

use std::{
    io,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{Signal, raise};
use signal_hook::iterator::{Handle, Signals};

use crate::{
    agents::wire::FromCoordinator,
    error::LaunchError,
    event::Event,
    guard::Guard,
    job::Job,
    logs::Logs,
    options::LaunchOptions,
    output::{Streams, await_all},
    port,
    rank_process::RankProcess,
    restart::Restarts,
    signals::passed_on,
    supervise::Supervisor,
    survivors::Survivors,
    verdict::{Outcome, RankEnd},
};

/// How long the launcher waits for further output after all ranks have ended.
const DRAIN: Duration = Duration::from_secs(2);

/// What a launcher keeps over all attempts.
pub(crate) struct Host<'a> {
    pub(crate) options: &'a LaunchOptions,
    streams: Streams,
    guard: Option<Guard>,
    signals: Handle,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// The ranks that wait for a restart in place.
    survivors: Survivors,
}

/// How an attempt ended.
pub(crate) struct Attempt {
    pub(crate) outcome: Outcome,
    /// Why its ranks could not be started.
    pub(crate) error: Option<LaunchError>,
    /// What the coordinator of several hosts sent meanwhile that was not about the ranks.
    pub(crate) message: Option<FromCoordinator>,
}

impl<'a> Host<'a> {
    /// Starts the guard and the threads for output and signals.
    pub(crate) fn new(options: &'a LaunchOptions) -> Result<Self, LaunchError> {
        let streams = Streams::new().map_err(LaunchError::Watch)?;
        let guard = options.entry.as_deref().map(Guard::start).transpose();
        let (sender, events) = channel();
        Ok(Self {
            options,
            streams,
            guard: guard.map_err(LaunchError::Watch)?,
            signals: watch_signals(sender.clone()).map_err(LaunchError::Watch)?,
            sender,
            events,
            survivors: Survivors::default(),
        })
    }

    /// Runs the ranks of a job that has no other host, or whose hosts do not agree on restarts.
    pub(crate) fn run(&mut self, first: Job) -> Result<Outcome, LaunchError> {
        let mut job = first;
        let mut restarts = Restarts::new(self.options.restart);
        for attempt in 0.. {
            let begin = Instant::now();
            let Attempt {
                mut outcome, error, ..
            } = self.attempt(self.options.node_rank, self.options.nnodes, attempt, &job)?;
            if let Some(error) = error {
                return Err(error);
            }
            self.report(&outcome);
            if !outcome.is_failure() {
                return Ok(outcome);
            }
            if let Some(pid) = outcome.held() {
                self.say(&format!(
                    "no restart: process {pid} is still running and holds its GPU and ports"
                ));
                return Ok(self.dismiss_survivors(outcome));
            }
            let lasted = begin.elapsed();
            let Some(restart) = restarts.after(&outcome, lasted, |text| self.say(text)) else {
                return Ok(self.dismiss_survivors(outcome));
            };
            if let Err(signal) = self.pause(restart.pause) {
                outcome.signal = Some(signal);
                self.report(&outcome);
                return Ok(self.dismiss_survivors(outcome));
            }
            // Another port and another token, so that nothing of this attempt can join the next.
            let next = Job::of(self.options)?;
            job = next.of_attempt(attempt + 1, job.launch, outcome.reason(|_| None));
        }
        unreachable!("the attempts end with a failure without a restart")
    }

    /// Starts the ranks of node `node_rank` of `nnodes`, and waits until they end or wait for a
    /// restart.
    ///
    /// # Errors
    /// A log cannot be opened.
    pub(crate) fn attempt(
        &mut self,
        node_rank: usize,
        nnodes: usize,
        attempt: usize,
        job: &Job,
    ) -> Result<Attempt, LaunchError> {
        let options = LaunchOptions {
            node_rank,
            nnodes,
            ..self.options.clone()
        };
        let first = node_rank * options.nproc;
        let open = |dir| Logs::open(dir, first..first + options.nproc, self.streams.errors());
        let logs = options.log_dir.as_deref().map(open).transpose();
        let logs = logs.map_err(LaunchError::Logs)?;
        if attempt > 0 && node_rank == 0 {
            port::await_free(job.port);
        }
        let streams = self.streams.clone();
        streams.set_logs(logs);
        let survivors = self.survivors_for(node_rank);
        let mut run = Supervisor::new(&options, attempt, self.guard.as_mut());
        let mut survivors = survivors.into_iter().peekable();
        for local_rank in 0..options.nproc {
            let rank = first + local_rank;
            let is_of_rank = |survivor: &RankProcess| survivor.local_rank == local_rank;
            if let Some(mut survivor) = survivors.next_if(is_of_rank) {
                if !survivor.is_alive() {
                    // The event of its end was left out while it waited.
                    let serial = survivor.serial;
                    let _ = self.sender.send(Event::GroupEnded { serial });
                }
                survivor.restart(job.restart(attempt, rank, nnodes * options.nproc));
                run.add(survivor);
                continue;
            }
            let started =
                RankProcess::start(&options, local_rank, attempt, job, &self.sender, &streams);
            match started {
                Ok(process) => run.add_started(process),
                Err(error) => {
                    survivors.for_each(|survivor| run.add(survivor));
                    run.kill();
                    run.supervise(&self.events);
                    let message = run.message.take();
                    return Ok(Attempt {
                        outcome: run.into_outcome().0,
                        error: Some(LaunchError::Start { rank, error }),
                        message,
                    });
                }
            }
        }
        run.supervise(&self.events);
        let ended = run.ranks.iter().filter(|rank| rank.has_ended());
        await_all(ended.flat_map(RankProcess::outputs), DRAIN);
        streams.report_repeats();
        streams.flush();
        let message = run.message.take();
        let (outcome, waiting) = run.into_outcome();
        self.survivors.wait(waiting);
        Ok(Attempt {
            outcome,
            message,
            error: None,
        })
    }

    /// The ranks of node `node_rank` that restart in place, in order. Ends those that do not.
    fn survivors_for(&mut self, node_rank: usize) -> Vec<RankProcess> {
        let nproc = self.options.nproc;
        let first = node_rank * nproc;
        let found = self.survivors.take(first..first + nproc);
        found.said.iter().for_each(|text| self.say(text));
        self.dismiss(found.dismissed);
        found.kept
    }

    /// Ends the ranks that wait for a restart, because there is none, and says how they ended.
    fn dismiss_survivors(&mut self, mut outcome: Outcome) -> Outcome {
        let waiting = self.survivors.take_all();
        for end in self.dismiss(waiting) {
            let same = outcome.ends.iter_mut().find(|same| same.rank == end.rank);
            same.into_iter().for_each(|same| same.by = end.by);
        }
        outcome
    }

    /// Ends the ranks that wait for a restart, because others run without them.
    pub(crate) fn free(&mut self) {
        let waiting = self.survivors.take_all();
        self.dismiss(waiting);
    }

    /// Ends ranks that wait for a restart. A signal or a message that comes meanwhile comes again
    /// afterwards: it is meant for the ranks of the next attempt too.
    fn dismiss(&mut self, ranks: Vec<RankProcess>) -> Vec<RankEnd> {
        let mut run = Supervisor::new(self.options, 0, self.guard.as_mut());
        for mut rank in ranks {
            let is_alive = rank.is_alive();
            rank.dismiss();
            run.add(rank);
            // The event of its end was left out while it waited.
            if !is_alive {
                run.end(run.ranks.len() - 1);
            }
        }
        run.settle();
        run.supervise(&self.events);
        await_all(run.ranks.iter().flat_map(RankProcess::outputs), DRAIN);
        let message = run.message.take().map(Event::Coordinator);
        let outcome = run.into_outcome().0;
        for event in outcome.signal.map(Event::Signal).into_iter().chain(message) {
            let _ = self.sender.send(event);
        }
        outcome.ends
    }

    /// The next event, or `None` after `patience`. Ends of ranks of an attempt that is over are left
    /// out, and a request to suspend is obeyed.
    pub(crate) fn next(&self, patience: Duration) -> Option<Event> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(Event::Ended { .. } | Event::GroupEnded { .. } | Event::Said { .. }) => {}
                Ok(Event::Signal(number)) if number == Signal::SIGTSTP as i32 => {
                    let _ = raise(Signal::SIGSTOP);
                }
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// The sender of events, for other threads.
    pub(crate) fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Waits; ends with the number of a signal that asks to stop.
    fn pause(&self, duration: Duration) -> Result<(), i32> {
        match self.next(duration) {
            Some(Event::Signal(number)) => Err(number),
            _ => Ok(()),
        }
    }

    /// Writes a line of the launcher itself to standard error.
    pub(crate) fn say(&self, text: &str) {
        self.speaker()(text);
    }

    /// What writes such lines, for another thread.
    pub(crate) fn speaker(&self) -> impl Fn(&str) + Send + 'static {
        let streams = self.streams.clone();
        move |text| streams.say(&format!("megaburn launch: {text}"))
    }

    fn report(&self, outcome: &Outcome) {
        if self.options.reports_cause && (outcome.cause().is_some() || outcome.signal.is_some()) {
            self.say(&outcome.to_string());
        }
    }

    /// Ends ranks that still wait for a restart, stops to watch signals, and writes the rest of the
    /// output.
    pub(crate) fn close(mut self) {
        self.free();
        self.signals.close();
        self.streams.flush();
    }
}

fn watch_signals(events: Sender<Event>) -> io::Result<Handle> {
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
