//! The ranks' output: passed on line by line, never mixed within a line.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader, Read, Write},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// So many last lines of standard error are kept to be told again.
const KEPT: usize = 20;
/// A line is passed on in pieces of this size at most.
const LONGEST: u64 = 1 << 20;

/// Which stream of the launcher a line goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sink {
    Out,
    Err,
}

/// The last lines of a rank.
pub(super) type LastWords = Arc<Mutex<VecDeque<String>>>;

/// Waits for the pumps that it started.
#[derive(Debug)]
pub(super) struct Pumps {
    done: Sender<()>,
    ended: std::sync::mpsc::Receiver<()>,
    started: usize,
}

impl Pumps {
    pub(super) fn new() -> Self {
        let (done, ended) = channel();
        Self { done, ended, started: 0 }
    }

    /// Passes on what `from` says: rank 0 as it is, the others with their names.
    pub(super) fn start(
        &mut self,
        rank: usize,
        from: impl Read + Send + 'static,
        sink: Sink,
        last_words: Option<LastWords>,
    ) -> io::Result<()> {
        let done = self.done.clone();
        let prefix = if rank == 0 { String::new() } else { format!("[rank {rank}] ") };
        thread::Builder::new().name(format!("output-{rank}")).spawn(move || {
            pump(from, &prefix, sink, last_words.as_ref());
            // Nobody waits any more if this fails.
            let _ = done.send(());
        })?;
        self.started += 1;
        Ok(())
    }

    /// Returns when all has been passed on, or after `patience`: a process that a rank left behind
    /// may hold its output open.
    pub(super) fn finish(self, patience: Duration) {
        let until = Instant::now() + patience;
        for _ in 0..self.started {
            let left = until.saturating_duration_since(Instant::now());
            if self.ended.recv_timeout(left).is_err() {
                return;
            }
        }
    }
}

fn pump(from: impl Read, prefix: &str, sink: Sink, last_words: Option<&LastWords>) {
    let mut from = BufReader::new(from);
    let mut line = prefix.as_bytes().to_vec();
    loop {
        line.truncate(prefix.len());
        match from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
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
            words.push_back(String::from_utf8_lossy(&line[prefix.len()..line.len() - 1]).into());
        }
        // A launcher whose own output is closed still drains its ranks'.
        let _ = match sink {
            Sink::Out => write_line(&mut io::stdout().lock(), &line),
            Sink::Err => write_line(&mut io::stderr().lock(), &line),
        };
    }
}

fn write_line(to: &mut impl Write, line: &[u8]) -> io::Result<()> {
    to.write_all(line)?;
    to.flush()
}
