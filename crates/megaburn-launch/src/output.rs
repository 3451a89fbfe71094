//! Passes on the ranks' output line by line, never mixed within a line. A reader of the launcher's
//! output that stops reading cannot block the ranks forever.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    logs::Logs,
    queue::{Output, OutputQueue},
    repeats::Repeats,
};

/// How many of the last lines of standard error are kept for the final report.
const KEPT: usize = 20;
/// A longer line is passed on in pieces of this size.
const LONGEST: u64 = 1 << 16;
/// Lines that may wait while the launcher's output is not read.
const WAITING: usize = 1024;
/// How long a writing rank is blocked by a reader that pauses; after that, lines are dropped.
const SLOW_READER: Duration = Duration::from_secs(10);
/// At the end, the remaining lines are given up when none could be written for this long.
const PATIENCE: Duration = Duration::from_secs(2);

/// The stream of the launcher that a line is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sink {
    Out,
    Err,
}

/// The last lines that a rank wrote to standard error.
pub(crate) type LastWords = Arc<Mutex<VecDeque<String>>>;

/// The rank and stream that a line comes from.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// It may change when the rank restarts in place.
    pub(crate) rank: Arc<AtomicUsize>,
    pub(crate) local_rank: usize,
    pub(crate) sink: Sink,
}

/// The launcher's own streams, and the files in [`super::LaunchOptions::log_dir`].
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    out: OutputQueue<Vec<u8>>,
    err: OutputQueue<Vec<u8>>,
    /// The log files of the ranks of this attempt. Ranks that restart in place may have others than
    /// before.
    logs: Arc<Mutex<Option<Logs>>>,
    repeats: Arc<Repeats>,
}

impl Streams {
    pub(crate) fn new() -> io::Result<Self> {
        let out = stream("stdout", io::stdout())?;
        let err = stream("stderr", io::stderr())?;
        Ok(Self {
            out,
            err,
            logs: Arc::default(),
            repeats: Arc::default(),
        })
    }

    /// Writes what ranks print into these files from now on.
    pub(crate) fn set_logs(&self, logs: Option<Logs>) {
        *self.lock_logs() = logs;
    }

    fn lock_logs(&self) -> MutexGuard<'_, Option<Logs>> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a message of the launcher itself.
    pub(crate) fn say(&self, text: &str) {
        self.err.push(format!("{text}\n").into_bytes());
    }

    /// The queue that [`say`](Self::say) writes to, for use by another thread.
    pub(crate) fn errors(&self) -> OutputQueue<Vec<u8>> {
        self.err.clone()
    }

    /// Passes on a line, including its line end: rank 0's unchanged, the others' with a `[rank N]`
    /// prefix.
    fn pass_on(&self, from: &Source, line: Vec<u8>) {
        let rank = from.rank.load(Ordering::Relaxed);
        let logs = self.lock_logs().clone();
        if let Some(logs) = logs {
            logs.write(from.local_rank, line.clone());
        }
        if from.sink == Sink::Err && self.repeats.is_repeated(rank, &line) {
            return;
        }
        let line = match rank {
            0 => line,
            rank => [format!("[rank {rank}] ").as_bytes(), &line].concat(),
        };
        let to = if from.sink == Sink::Out {
            &self.out
        } else {
            &self.err
        };
        to.push_within(line, SLOW_READER);
    }

    /// Reports which ranks wrote an error that was shown only once.
    pub(crate) fn report_repeats(&self) {
        self.repeats.lines().iter().for_each(|line| self.say(line));
    }

    /// Waits until everything is written, as long as the output is being read.
    pub(crate) fn flush(&self) {
        let logs = self.lock_logs().clone();
        logs.iter().for_each(|logs| logs.flush(PATIENCE));
        self.out.flush(PATIENCE);
        self.err.flush(PATIENCE);
    }
}

fn stream(name: &str, mut to: impl Write + Send + 'static) -> io::Result<OutputQueue<Vec<u8>>> {
    OutputQueue::spawn(name, WAITING, move |output: Output<Vec<u8>>| {
        // Even if its own output is closed, the launcher must keep draining the ranks' output.
        let _ = match output {
            Output::Item(line) => to.write_all(&line),
            Output::Dropped(lines) => {
                writeln!(
                    to,
                    "megaburn launch: {lines} lines were dropped here: the output was not being \
                    read"
                )
            }
        }
        .and_then(|()| to.flush());
    })
}

/// Writes a message to standard error when there is no launcher yet.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Starts a thread that passes on everything read from `pipe`. The receiver's channel ends with it.
pub(crate) fn pass_on_all(
    streams: &Streams,
    from: Source,
    pipe: impl Read + Send + 'static,
    last_words: Option<LastWords>,
) -> io::Result<Receiver<()>> {
    let (runs, ended) = channel::<()>();
    let streams = streams.clone();
    thread::Builder::new()
        .name(format!("output-{}", from.local_rank))
        .spawn(move || {
            pump(pipe, &from, &streams, last_words.as_ref());
            drop(runs);
        })?;
    Ok(ended)
}

/// Returns when everything has been passed on, or after `patience`, since a process that outlived
/// its rank may keep the output open.
pub(crate) fn await_all<'a>(
    outputs: impl IntoIterator<Item = &'a Receiver<()>>,
    patience: Duration,
) {
    let until = Instant::now() + patience;
    for output in outputs {
        let left = until.saturating_duration_since(Instant::now());
        if output.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn pump(pipe: impl Read, from: &Source, streams: &Streams, last_words: Option<&LastWords>) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        match pipe.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if let Some(words) = last_words {
            let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
            if words.len() == KEPT {
                words.pop_front();
            }
            words.push_back(String::from_utf8_lossy(&line[..line.len() - 1]).into());
        }
        streams.pass_on(from, line);
    }
}
