use std::{
    io::BufReader,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burn::tensor::Bytes;

use super::{
    socket::Until,
    wire::{Frame, Word, read_frame, write_frame},
};
use crate::{
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::{Message, Payload},
    transport::{Overdue, Transport},
};

/// How long the bad news of one failure may hold up the rank that brings it.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a word may take for which nobody waits.
const AT_ONCE: Duration = Duration::from_millis(100);
/// How long a rank that leaves waits until the others have read what it sent them.
const LINGER: Duration = Duration::from_secs(5);
/// The same after a failure, when nothing is worth waiting for.
const LINGER_FAILED: Duration = Duration::from_millis(200);
/// A write fails a moment before the reader sees why; it is given this long.
const REASON: Duration = Duration::from_secs(1);
const READ_BUFFER: usize = 64 << 10;

/// Ranks as processes, each connected to every other. One thread a peer puts what arrives into the
/// same [`Mailbox`] that the thread transport has, so nothing a rank sends waits for a receiver.
#[derive(Debug)]
pub(crate) struct TcpTransport {
    rank: usize,
    mailbox: Arc<Mailbox<Message>>,
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    stream: Arc<TcpStream>,
    /// Held while writing; true once a frame was cut short, so that nothing can follow it.
    torn: Mutex<bool>,
    reader: Option<JoinHandle<()>>,
}

impl TcpTransport {
    /// The end of `rank` over its connections, by rank.
    pub(super) fn new(rank: usize, streams: Vec<Option<TcpStream>>) -> std::io::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        let mut transport = Self { rank, mailbox, peers: Vec::with_capacity(streams.len()) };
        for (from, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream.map(Arc::new) else {
                transport.peers.push(None);
                continue;
            };
            stream.set_read_timeout(None)?;
            let (mailbox, reading) = (transport.mailbox.clone(), stream.clone());
            let name = format!("rank-{rank}-from-{from}");
            let reader =
                thread::Builder::new().name(name).spawn(move || read(from, &reading, &mailbox))?;
            let torn = Mutex::new(false);
            transport.peers.push(Some(Peer { stream, torn, reader: Some(reader) }));
        }
        Ok(transport)
    }

    fn write(
        &self,
        to: usize,
        word: &Word,
        channel: Channel,
        payload: Option<&Payload>,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let gone = || self.gone(to);
        if let Some(error) = gone() {
            return Err(error);
        }
        let peer = self.peers[to].as_ref().expect("the rank itself is never written to");
        let mut torn = peer.lock();
        let overdue = || deadline.is_half_over() && self.mailbox.is_asked();
        let stop = || gone().is_some() || overdue();
        let until = Until::new(&peer.stream, deadline.at()).or(&stop);
        let Err((written, error)) = peer.write(&mut torn, until, word, channel, payload) else {
            return Ok(());
        };
        drop(torn);
        // Decided before the connection is ended here: its reader takes that for the peer's death.
        let late = deadline.is_over() || overdue();
        let late = late.then(|| gone().unwrap_or(TransportError::Timeout));
        if written > 0 {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
        if let Some(error) = late {
            return Err(error);
        }
        let why = format!("its connection ended: {error}");
        let lost = TransportError::Lost { peer: to, why };
        Err(self.mailbox.wait_gone(to, Instant::now() + REASON).unwrap_or(lost))
    }

    /// At once to all, so that one stopped peer does not keep the news from the others.
    fn tell_all(&self, word: &Word, deadline: Instant) {
        thread::scope(|scope| {
            for peer in self.others() {
                let tell = || peer.last_word(word, deadline);
                if thread::Builder::new().spawn_scoped(scope, tell).is_err() {
                    peer.last_word(word, deadline);
                }
            }
        });
    }

    fn others(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().flatten()
    }
}

impl Peer {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.torn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(
        &self,
        torn: &mut bool,
        until: Until<'_>,
        word: &Word,
        channel: Channel,
        payload: Option<&Payload>,
    ) -> Result<(), (usize, std::io::Error)> {
        if *torn {
            return Err((0, std::io::ErrorKind::BrokenPipe.into()));
        }
        let result = write_frame(until, word, channel, payload);
        *torn = result.as_ref().is_err_and(|(written, _)| *written > 0);
        result
    }

    /// Says a last word, if the connection is whole; ends it where it is not, which is as clear.
    fn last_word(&self, word: &Word, deadline: Instant) {
        if !self.say(word, deadline) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Says a word without a payload; false if the connection did not take it in time.
    fn say(&self, word: &Word, deadline: Instant) -> bool {
        loop {
            match self.torn.try_lock() {
                Ok(mut torn) => {
                    let until = Until::new(&self.stream, deadline);
                    return self.write(&mut torn, until, word, 0, None).is_ok();
                }
                Err(TryLockError::Poisoned(_)) => return false,
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return false,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// Puts what rank `from` sends into the mailbox until its connection ends.
fn read(from: usize, stream: &TcpStream, mailbox: &Mailbox<Message>) {
    let mut reader = BufReader::with_capacity(READ_BUFFER, stream);
    loop {
        let Frame { word, channel, payload } = match read_frame(&mut reader) {
            Ok(Some(frame)) => frame,
            Ok(None) => return mailbox.die(from, "it ended without a word, killed perhaps"),
            Err(error) => return mailbox.die(from, &format!("its connection ended: {error}")),
        };
        match word {
            Word::Data(call) => {
                let payload = Payload::new(Bytes::from_bytes_vec(payload));
                mailbox.deliver(from, channel, Message { call, payload });
            }
            Word::Overdue(Overdue::Question) => mailbox.ask(from),
            Word::Overdue(Overdue::WaitsToo) => mailbox.answer(from),
            Word::Abort { by, reason } => mailbox.abort(by, &reason),
            Word::Leave => {
                mailbox.leave(from, "it finished and left");
                // The peer waits for this end of the connection as the proof that all was read.
                let _ = stream.shutdown(Shutdown::Write);
            }
            other => return mailbox.die(from, &format!("it spoke out of turn: {other:?}")),
        }
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.peers.len()
    }

    fn mailbox(&self) -> &Mailbox<Message> {
        &self.mailbox
    }

    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        self.write(to, &Word::Data(message.call), channel, Some(&message.payload), deadline)
    }

    fn say(&self, to: usize, overdue: Overdue) {
        if let Some(peer) = &self.peers[to] {
            peer.say(&Word::Overdue(overdue), Instant::now() + AT_ONCE);
        }
    }

    fn abort(&self, by: usize, reason: &str) {
        // First the own mailbox: it stops this rank's other threads, which may be writing.
        self.mailbox.abort(by, reason);
        let word = Word::Abort { by, reason: reason.to_string() };
        self.tell_all(&word, Instant::now() + LAST_WORDS);
    }
}

impl Drop for TcpTransport {
    /// Leaves in order: says so, and waits until the others have read everything.
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort(self.rank, "it panicked");
        }
        let failed = self.gone(self.rank).is_some();
        let deadline = Instant::now() + if failed { LINGER_FAILED } else { LINGER };
        self.tell_all(&Word::Leave, deadline);
        for peer in self.others() {
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
        for peer in self.peers.iter_mut().flatten() {
            let Some(reader) = peer.reader.take() else { continue };
            while !reader.is_finished() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            // Wakes a reader whose peer did not answer.
            let _ = peer.stream.shutdown(Shutdown::Both);
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
#[path = "transport_tests.rs"]
mod tests;
