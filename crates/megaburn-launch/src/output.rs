//! The ranks' output: passed on line by line, never mixed within a line. Nobody waits for ever for a
//! reader of the launcher's own output.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    logs::Logs,
    queue::{Output, OutputQueue},
    repeats::Repeats,
};

/// So many last lines of standard error are kept to be told again.
const KEPT: usize = 20;
/// A line is passed on in pieces of this size at most.
const LONGEST: u64 = 1 << 16;
/// Lines that may wait while nobody reads the launcher's output.
const WAITING: usize = 1024;
/// A rank that writes is held up for so long by a reader that pauses; then lines are dropped.
const SLOW_READER: Duration = Duration::from_secs(10);
/// At the end, lines are given up when none could be written for so long.
const PATIENCE: Duration = Duration::from_secs(2);

/// Which stream of the launcher a line goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sink {
    Out,
    Err,
}

/// The last lines of a rank.
pub(crate) type LastWords = Arc<Mutex<VecDeque<String>>>;

/// Where a line comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) sink: Sink,
}

/// The launcher's own streams, and the files of [`super::LaunchOptions::log_dir`].
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    out: OutputQueue<Vec<u8>>,
    err: OutputQueue<Vec<u8>>,
    logs: Option<Logs>,
    repeats: Arc<Repeats>,
}

impl Streams {
    pub(crate) fn new() -> io::Result<Self> {
        let out = stream("stdout", io::stdout())?;
        let err = stream("stderr", io::stderr())?;
        Ok(Self {
            out,
            err,
            logs: None,
            repeats: Arc::default(),
        })
    }

    pub(crate) fn with_logs(self, logs: Option<Logs>) -> Self {
        Self { logs, ..self }
    }

    /// Says something of the launcher itself.
    pub(crate) fn say(&self, text: &str) {
        self.err.push(format!("{text}\n").into_bytes());
    }

    /// The queue behind [`say`](Self::say), for a thread that has something to say.
    pub(crate) fn errors(&self) -> OutputQueue<Vec<u8>> {
        self.err.clone()
    }

    /// Passes on a line, its end included: rank 0's as it is, the others' with their names.
    fn pass_on(&self, from: Source, line: Vec<u8>) {
        if let Some(logs) = &self.logs {
            logs.write(from.local_rank, line.clone());
        }
        if from.sink == Sink::Err && self.repeats.is_repeated(from.rank, &line) {
            return;
        }
        let line = match from.rank {
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

    /// Says which ranks wrote the errors that were shown once.
    pub(crate) fn report_repeats(&self) {
        self.repeats.lines().iter().for_each(|line| self.say(line));
    }

    /// Waits until all is written, as far as somebody reads it.
    pub(crate) fn flush(&self) {
        self.logs.iter().for_each(|logs| logs.flush(PATIENCE));
        self.out.flush(PATIENCE);
        self.err.flush(PATIENCE);
    }
}

fn stream(name: &str, mut to: impl Write + Send + 'static) -> io::Result<OutputQueue<Vec<u8>>> {
    OutputQueue::spawn(name, WAITING, move |output: Output<Vec<u8>>| {
        // A launcher whose own output is closed still drains its ranks'.
        let _ = match output {
            Output::Item(line) => to.write_all(&line),
            Output::Dropped(lines) => {
                writeln!(
                    to,
                    "megaburn launch: {lines} lines are missing here: nobody read them"
                )
            }
        }
        .and_then(|()| to.flush());
    })
}

/// Says something where there is no launcher yet.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Waits for the pumps that it started.
#[derive(Debug)]
pub(crate) struct Pumps {
    pub(crate) streams: Streams,
    done: Sender<()>,
    ended: Receiver<()>,
    started: usize,
}

impl Pumps {
    pub(crate) fn new(streams: Streams) -> Self {
        let (done, ended) = channel();
        Self {
            streams,
            done,
            ended,
            started: 0,
        }
    }

    /// Passes on what `pipe` says.
    pub(crate) fn start(
        &mut self,
        from: Source,
        pipe: impl Read + Send + 'static,
        last_words: Option<LastWords>,
    ) -> io::Result<()> {
        let done = self.done.clone();
        let streams = self.streams.clone();
        thread::Builder::new()
            .name(format!("output-{}", from.rank))
            .spawn(move || {
                pump(pipe, from, &streams, last_words.as_ref());
                // Nobody waits any more if this fails.
                let _ = done.send(());
            })?;
        self.started += 1;
        Ok(())
    }

    /// Returns when all has been passed on, or after `patience`: a process that a rank left behind
    /// may hold its output open.
    pub(crate) fn finish(&self, patience: Duration) {
        let until = Instant::now() + patience;
        for _ in 0..self.started {
            let left = until.saturating_duration_since(Instant::now());
            if self.ended.recv_timeout(left).is_err() {
                return;
            }
        }
    }
}

fn pump(pipe: impl Read, from: Source, streams: &Streams, last_words: Option<&LastWords>) {
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
