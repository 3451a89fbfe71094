//! The process of a rank.

use std::{
    io,
    process::Child,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, Sender},
    },
    thread,
    time::Duration,
};

use nix::{sys::signal::Signal, unistd::Pid};

use crate::{
    child::{await_end, group_runs, runs, signal, start},
    event::Event,
    in_place::{FromRank, RankLink, Restart, ToRank, WaitReason},
    job::Job,
    options::LaunchOptions,
    output::{LastWords, Sink, Source, Streams, pass_on_all},
    verdict::EndedBy,
};

/// How often the launcher checks whether the other processes of a rank have ended, once its first
/// process was killed.
const LOOK: Duration = Duration::from_millis(100);

/// The process of a rank and its state.
#[derive(Debug)]
pub(crate) struct RankProcess {
    /// Distinguishes it from other processes that this launcher starts, also from earlier ones with
    /// the same process id.
    pub(crate) serial: usize,
    pub(crate) local_rank: usize,
    rank: Arc<AtomicUsize>,
    pub(crate) pid: Pid,
    pub(crate) standing: Standing,
    child: Child,
    last_words: LastWords,
    outputs: Vec<Receiver<()>>,
    link: Option<RankLink>,
}

/// What the launcher knows of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It runs, and ends if it loses a peer.
    Runs,
    /// It runs, and waits for a restart if it loses a peer.
    Enrolled,
    /// It waits for a restart.
    Waits(WaitReason),
    /// It has ended, or is abandoned.
    Ended,
}

impl RankProcess {
    /// Starts local rank `local_rank`; its events are sent to `events`.
    ///
    /// # Errors
    /// The system cannot start the process or a thread.
    pub(crate) fn start(
        options: &LaunchOptions,
        local_rank: usize,
        attempt: usize,
        job: &Job,
        events: &Sender<Event>,
        streams: &Streams,
    ) -> io::Result<Self> {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let serial = STARTED.fetch_add(1, Ordering::Relaxed);
        let (link, stdin) = options
            .restarts_in_place()
            .then(RankLink::new)
            .transpose()?
            .unzip();
        let child = start(options, local_rank, attempt, job, stdin)?;
        let rank = options.node_rank * options.nproc + local_rank;
        let mut process = Self::of(child, serial, local_rank);
        process.rank.store(rank, Ordering::Relaxed);
        process.link = link;
        process.watch(events, streams)?;
        Ok(process)
    }

    pub(crate) fn of(child: Child, serial: usize, local_rank: usize) -> Self {
        Self {
            serial,
            local_rank,
            rank: Arc::default(),
            pid: Pid::from_raw(child.id().cast_signed()),
            standing: Standing::Runs,
            child,
            last_words: LastWords::default(),
            outputs: Vec::new(),
            link: None,
        }
    }

    /// Starts the threads that wait for its end, pass on its output, and hear what it says.
    fn watch(&mut self, events: &Sender<Event>, streams: &Streams) -> io::Result<()> {
        let &mut Self {
            serial,
            local_rank,
            pid,
            ..
        } = self;
        if let Some(link) = &self.link {
            let events = events.clone();
            link.listen(move |said| {
                let _ = events.send(Event::Said { serial, said });
            })?;
        }
        let events = events.clone();
        thread::Builder::new()
            .name(format!("wait-{local_rank}"))
            .spawn(move || {
                let killed = await_end(pid);
                // Sending cannot fail: the launcher waits for every rank that it started.
                let _ = events.send(Event::Ended { serial, killed });
                while killed && group_runs(pid) {
                    thread::sleep(LOOK);
                }
                let _ = events.send(Event::GroupEnded { serial });
            })?;
        let from = |sink| Source {
            rank: self.rank.clone(),
            local_rank,
            sink,
        };
        let out = self.child.stdout.take().expect("stdout is piped");
        let err = self.child.stderr.take().expect("stderr is piped");
        let words = self.last_words.clone();
        let outputs = [
            pass_on_all(streams, from(Sink::Out), out, None)?,
            pass_on_all(streams, from(Sink::Err), err, Some(words))?,
        ];
        self.outputs.extend(outputs);
        Ok(())
    }

    /// Whether it must still end, or wait for a restart.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.standing, Standing::Runs | Standing::Enrolled)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.standing == Standing::Ended
    }

    /// Whether its process runs, for a rank that waited while nothing supervised it. One that has
    /// ended stays to be waited for, so that its process id has no other owner.
    pub(crate) fn is_alive(&self) -> bool {
        runs(self.pid)
    }

    /// Its number among all ranks.
    pub(crate) fn rank(&self) -> usize {
        self.rank.load(Ordering::Relaxed)
    }

    /// Whether it waits for a restart.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.standing, Standing::Waits(_))
    }

    /// The number of steps after which it lost a peer, if it did.
    pub(crate) fn lost_after(&self) -> Option<u64> {
        match self.standing {
            Standing::Waits(WaitReason::LostPeer { after_step, .. }) => Some(after_step),
            _ => None,
        }
    }

    /// Takes note of what it says.
    pub(crate) fn hear(&mut self, said: &FromRank) {
        self.standing = match (self.standing, said) {
            (Standing::Ended, _) => Standing::Ended,
            (_, FromRank::Enrolled) => Standing::Enrolled,
            (_, &FromRank::Waits(reason)) => Standing::Waits(reason),
        };
    }

    /// Lets it meet the other ranks again. If it has ended meanwhile, the launcher learns that as of
    /// any other rank.
    pub(crate) fn restart(&mut self, restart: Restart) {
        self.standing = Standing::Enrolled;
        self.rank.store(restart.rank, Ordering::Relaxed);
        lock(&self.last_words).clear();
        self.say(&ToRank::Restart(restart));
    }

    /// Asks it to save at the end of a step and then to wait, if it can.
    pub(crate) fn regroup(&self) {
        if self.standing == Standing::Enrolled {
            self.say(&ToRank::Regroup);
        }
    }

    /// Asks it to end its collectives and then to wait, if it can.
    pub(crate) fn leave(&self) {
        if self.standing == Standing::Enrolled {
            self.say(&ToRank::Leave);
        }
    }

    fn say(&self, message: &ToRank) {
        let _ = self.link.as_ref().map(|link| link.send(message));
    }

    /// Ends it, if it waits for a restart: it then exits with its error.
    pub(crate) fn dismiss(&mut self) {
        self.link = None;
        self.standing = Standing::Runs;
    }

    /// Records its end, and kills the processes that it left running.
    pub(crate) fn end(&mut self) -> EndedBy {
        signal(self.pid, Signal::SIGKILL);
        self.standing = Standing::Ended;
        match self.child.wait() {
            Ok(status) => EndedBy::of(status),
            // The exit status was already collected elsewhere, so it is unknown and counts as a
            // failure.
            Err(_) => EndedBy::Code(1),
        }
    }

    /// The last lines that it wrote to standard error.
    pub(crate) fn last_words(&self) -> Vec<String> {
        lock(&self.last_words).iter().cloned().collect()
    }

    /// What ends when its output has been passed on.
    pub(crate) fn outputs(&self) -> &[Receiver<()>] {
        &self.outputs
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
