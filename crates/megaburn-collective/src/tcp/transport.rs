use std::{
    io::BufReader,
    net::{Shutdown, TcpStream},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burn::tensor::Bytes;

use super::{
    line::Line,
    socket::Until,
    wire::{ControlMessage, Frame, read_frame},
};
use crate::{
    activity::Activity,
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::{Message, Payload},
    options::GroupOptions,
    transport::{TimeoutProbe, Transport},
};

/// How long reporting a failure may block the rank that reports it.
const FAILURE_GRACE: Duration = Duration::from_secs(1);
/// How long a send may take for a message that no rank waits for.
const AT_ONCE: Duration = Duration::from_millis(100);
/// How long a leaving rank waits until the others have read its messages.
const LINGER: Duration = Duration::from_secs(5);
/// The same limit after a failure, when the remaining messages do not matter.
const LINGER_FAILED: Duration = Duration::from_millis(200);
/// A write may fail a moment before the reader learns the reason; wait this long for it.
const REASON: Duration = Duration::from_secs(1);
const READ_BUFFER: usize = 64 << 10;

/// Ranks as processes, each connected to every other. One thread per peer puts received messages
/// into the same [`Mailbox`] that the thread transport uses, so a send never waits for a receiver.
///
/// The number of queued messages is deliberately unlimited. A reader that stopped at a limit would
/// no longer receive failures and questions, and a rank that waits for a later message of one group
/// could wait forever for messages of another to be taken.
///
/// Peers are ranks of the same job, and what they send ahead is bounded by their own program: one
/// call of each group and, in pipelines, the micro-batches in flight. Memory for a message is
/// allocated as its bytes arrive, not by the size in its header.
#[derive(Debug)]
pub(crate) struct TcpTransport {
    rank: usize,
    mailbox: Arc<Mailbox<Message>>,
    activity: Arc<Activity>,
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    line: Arc<Line>,
    reader: Option<JoinHandle<()>>,
}

impl TcpTransport {
    /// Creates the endpoint of `rank` from its connections, indexed by rank.
    pub(super) fn new(
        rank: usize,
        options: GroupOptions,
        streams: Vec<Option<TcpStream>>,
    ) -> std::io::Result<Self> {
        let mailbox = Arc::new(Mailbox::default());
        let activity = Activity::new(rank, options);
        let peers = Vec::with_capacity(streams.len());
        let mut transport = Self {
            rank,
            mailbox,
            activity,
            peers,
        };
        for (from, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                transport.peers.push(None);
                continue;
            };
            stream.set_read_timeout(None)?;
            let line = Arc::new(Line::new(stream));
            let reader = Reader {
                from,
                line: line.clone(),
                mailbox: transport.mailbox.clone(),
                activity: transport.activity.clone(),
            };
            let name = format!("rank-{rank}-from-{from}");
            let reader = thread::Builder::new()
                .name(name)
                .spawn(move || reader.run())?;
            transport.peers.push(Some(Peer {
                line,
                reader: Some(reader),
            }));
        }
        Ok(transport)
    }

    fn write(
        &self,
        to: usize,
        word: &ControlMessage,
        channel: Channel,
        payload: Option<&Payload>,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let gone = || self.gone(to);
        if let Some(error) = gone() {
            return Err(error);
        }
        let peer = self.peers[to]
            .as_ref()
            .expect("a rank never sends to itself");
        let mut torn = peer.line.lock();
        let overdue = || deadline.is_half_over() && self.mailbox.is_asked();
        let stop = || gone().is_some() || overdue();
        let until = Until::new(&peer.line.stream, deadline.at()).or(&stop);
        let Err((written, error)) = peer.line.write(&mut torn, until, word, channel, payload)
        else {
            return Ok(());
        };
        drop(torn);
        // Decide before shutting the connection down below, which the reader takes for the peer's
        // death.
        let late = deadline.is_over() || overdue();
        let late = late.then(|| gone().unwrap_or(TransportError::Timeout));
        if written > 0 {
            let _ = peer.line.stream.shutdown(Shutdown::Both);
        }
        if let Some(error) = late {
            return Err(error);
        }
        let why = format!("its connection ended: {error}");
        let lost = TransportError::Lost { peer: to, why };
        Err(self
            .mailbox
            .wait_gone(to, clock::now() + REASON)
            .unwrap_or(lost))
    }

    /// Sends to all at once, so that one stopped peer does not delay the message to the others.
    fn tell_all(&self, word: &ControlMessage, deadline: Instant) {
        thread::scope(|scope| {
            for peer in self.others() {
                let tell = || peer.line.last_word(word, deadline);
                if thread::Builder::new().spawn_scoped(scope, tell).is_err() {
                    peer.line.last_word(word, deadline);
                }
            }
        });
    }

    fn others(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().flatten()
    }
}

/// The thread that reads what one peer sends. It answers questions for its own rank, whose main
/// thread may be busy.
struct Reader {
    from: usize,
    line: Arc<Line>,
    mailbox: Arc<Mailbox<Message>>,
    activity: Arc<Activity>,
}

impl Reader {
    /// Puts received messages into the mailbox until the connection ends.
    fn run(self) {
        let Self {
            from,
            line,
            mailbox,
            activity,
        } = self;
        let mut reader = BufReader::with_capacity(READ_BUFFER, &line.stream);
        loop {
            let Frame {
                word,
                channel,
                payload,
            } = match read_frame(&mut reader) {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    return mailbox.die(
                        from,
                        "its connection closed without a message; \
                    it may have been killed",
                    );
                }
                Err(error) => return mailbox.die(from, &format!("its connection ended: {error}")),
            };
            match word {
                ControlMessage::Data(call) => {
                    let payload = Payload::new(Bytes::from_bytes_vec(payload));
                    mailbox.deliver(from, channel, Message { call, payload });
                }
                ControlMessage::TimeoutProbe(TimeoutProbe::Question) => match activity.busy() {
                    Some(busy) => {
                        line.say(
                            &ControlMessage::TimeoutProbe(TimeoutProbe::Busy(busy)),
                            clock::now() + AT_ONCE,
                        );
                    }
                    None => mailbox.ask(from),
                },
                ControlMessage::TimeoutProbe(TimeoutProbe::AlsoWaiting) => mailbox.answer(from),
                ControlMessage::TimeoutProbe(TimeoutProbe::Busy(busy)) => {
                    mailbox.answer_busy(from, busy)
                }
                ControlMessage::Abort { by, reason } => mailbox.abort(by, &reason),
                ControlMessage::Leave => {
                    mailbox.leave(from, "it finished and left");
                    // The peer waits for this half of the connection to close, as proof that
                    // everything was read.
                    let _ = line.stream.shutdown(Shutdown::Write);
                }
                other => {
                    return mailbox.die(
                        from,
                        &format!(
                            "it sent an unexpected message: \
                    {other:?}"
                        ),
                    );
                }
            }
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

    fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        self.write(
            to,
            &ControlMessage::Data(message.call),
            channel,
            Some(&message.payload),
            deadline,
        )
    }

    fn say(&self, to: usize, overdue: TimeoutProbe) {
        if let Some(peer) = &self.peers[to] {
            peer.line.say(
                &ControlMessage::TimeoutProbe(overdue),
                clock::now() + AT_ONCE,
            );
        }
    }

    fn abort(&self, by: usize, reason: &str) {
        // Abort the own mailbox first: this stops the rank's other threads, which may be writing.
        self.mailbox.abort(by, reason);
        let word = ControlMessage::Abort {
            by,
            reason: reason.to_string(),
        };
        self.tell_all(&word, clock::now() + FAILURE_GRACE);
    }
}

impl Drop for TcpTransport {
    /// Leaves in order: announces it and waits until the others have read everything.
    fn drop(&mut self) {
        if thread::panicking() {
            self.abort(self.rank, "it panicked");
        }
        let failed = self.gone(self.rank).is_some();
        let deadline = clock::now() + if failed { LINGER_FAILED } else { LINGER };
        self.tell_all(&ControlMessage::Leave, deadline);
        for peer in self.others() {
            let _ = peer.line.stream.shutdown(Shutdown::Write);
        }
        for peer in self.peers.iter_mut().flatten() {
            let Some(reader) = peer.reader.take() else {
                continue;
            };
            while !reader.is_finished() && clock::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            // Wakes a reader whose peer did not answer.
            let _ = peer.line.stream.shutdown(Shutdown::Both);
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
mod tests;
