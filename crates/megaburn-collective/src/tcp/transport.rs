use std::{
    net::Shutdown,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    acceptor::Acceptor, endpoint::Endpoint, flood::tell_all, line::Line, reader::AT_ONCE,
    socket::Until, stack::STACK_BYTES, wire::ControlMessage,
};
use crate::{
    activity::Activity,
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::{Message, Payload},
    transport::{TimeoutProbe, Transport},
};

/// How long reporting a failure may block the rank that reports it.
const FAILURE_GRACE: Duration = Duration::from_secs(1);
/// How long a leaving rank waits until the others have read its messages.
const LINGER: Duration = Duration::from_secs(5);
/// The same limit after a failure, when the remaining messages do not matter.
const LINGER_FAILED: Duration = Duration::from_millis(200);
/// A write may fail a moment before the reader learns the reason; wait this long for it.
const REASON: Duration = Duration::from_secs(1);

/// Ranks as processes, each connected to the ranks next to it in a tree, and to those that it
/// exchanges messages with. One thread per connection puts received messages into the same
/// [`Mailbox`] that the thread transport uses, so a send never waits for a receiver.
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
    endpoint: Arc<Endpoint>,
    acceptor: Option<Acceptor>,
}

impl TcpTransport {
    pub(super) fn new(endpoint: Arc<Endpoint>, acceptor: Option<Acceptor>) -> Self {
        Self { endpoint, acceptor }
    }

    #[cfg(test)]
    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Leaves at once, because the run does not start.
    pub(super) fn give_up(self, why: &str) {
        self.endpoint.mailbox.abort(self.endpoint.rank, why, false);
    }

    fn write(
        &self,
        to: usize,
        word: &ControlMessage,
        channel: Channel,
        payload: Option<&Payload>,
        deadline: Deadline,
    ) -> Result<(), TransportError> {
        let mailbox = &self.endpoint.mailbox;
        let gone = || mailbox.gone(to);
        if let Some(error) = gone() {
            return Err(error);
        }
        let overdue = || deadline.is_half_over() && mailbox.is_asked();
        let stop = || gone().is_some() || overdue();
        let late = || {
            let late = deadline.is_over() || overdue();
            late.then(|| gone().unwrap_or(TransportError::Timeout))
        };
        let lost = |why: String| {
            let lost = TransportError::Lost { peer: to, why };
            mailbox.wait_gone(to, clock::now() + REASON).unwrap_or(lost)
        };
        let line = match self.endpoint.line(to, deadline.at(), &stop) {
            Ok(line) => line,
            Err(why) => return Err(late().unwrap_or_else(|| lost(why))),
        };
        let mut torn = line.lock();
        let until = Until::new(&line.stream, deadline.at()).or(&stop);
        let Err((written, error)) = line.write(&mut torn, until, word, channel, payload) else {
            return Ok(());
        };
        drop(torn);
        // Decide before shutting the connection down below, which the reader takes for the peer's
        // death.
        let late = late();
        if written > 0 {
            let _ = line.stream.shutdown(Shutdown::Both);
        }
        Err(late.unwrap_or_else(|| lost(format!("its connection ended: {error}"))))
    }
}

impl Transport for TcpTransport {
    fn rank(&self) -> usize {
        self.endpoint.rank
    }

    fn world_size(&self) -> usize {
        self.endpoint.world_size
    }

    fn mailbox(&self) -> &Mailbox<Message> {
        &self.endpoint.mailbox
    }

    fn activity(&self) -> &Arc<Activity> {
        &self.endpoint.activity
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

    fn reach(&self, peer: usize) -> bool {
        self.endpoint.open_in_background(peer)
    }

    fn say(&self, to: usize, overdue: TimeoutProbe) {
        if let Some(line) = self.endpoint.open_line(to) {
            line.say(
                &ControlMessage::TimeoutProbe(overdue),
                clock::now() + AT_ONCE,
            );
        }
    }

    fn abort(&self, by: usize, reason: &str, is_hang: bool) {
        // Abort the own mailbox first: this stops the rank's other threads, which may be writing. If
        // another failure was first, the others hear of that one.
        self.endpoint.mailbox.abort(by, reason, is_hang);
        self.endpoint.spread_own();
    }
}

impl Endpoint {
    /// Passes on the first failure that this rank knows, and waits until that is done.
    fn spread_own(self: &Arc<Self>) {
        if let Some(word) = self.failure().filter(|_| self.has_started()) {
            self.spread(word, None);
            self.flood.await_end(clock::now() + FAILURE_GRACE);
        }
    }

    /// Whether there is a connection to `peer`. If not, opens one in the background.
    fn open_in_background(self: &Arc<Self>, peer: usize) -> bool {
        if self.open_line(peer).is_some() {
            return true;
        }
        if peer == self.rank || self.is_calling(peer) || self.mailbox.gone(peer).is_some() {
            return false;
        }
        let endpoint = self.clone();
        let open = move || {
            let stop = || endpoint.is_leaving() || endpoint.mailbox.gone(peer).is_some();
            let deadline = Deadline::after(endpoint.patience());
            let Err(why) = endpoint.line(peer, deadline.at(), &stop) else {
                return;
            };
            // A rank that died is reported by the ranks next to it. One that has left is not always.
            let known = endpoint.mailbox.wait_gone(peer, clock::now() + REASON);
            if known.is_none() && !endpoint.is_leaving() && !deadline.is_over() {
                let why = format!("it finished and left, or ended: {why}");
                endpoint.mailbox.leave(peer, &why);
            }
        };
        // Without a thread, the next message to or from the peer opens it.
        let thread = thread::Builder::new().name("open".into());
        let _ = thread.stack_size(STACK_BYTES).spawn(open);
        false
    }
}

impl Drop for TcpTransport {
    /// Leaves in order: announces it and waits until the others have read everything. The ranks next
    /// to this one hear last: they pass it on to ranks that may still be reading.
    fn drop(&mut self) {
        let Self { endpoint, acceptor } = self;
        if thread::panicking() {
            endpoint.mailbox.abort(endpoint.rank, "it panicked", false);
            endpoint.spread_own();
        }
        let failure = endpoint.failure();
        let linger = failure.as_ref().map_or(LINGER, |_| LINGER_FAILED);
        let deadline = clock::now() + linger;
        endpoint.begin_leaving();
        *acceptor = None;
        if let Some(word) = failure {
            // On a busy host it may not have been passed on yet, and this rank did not finish.
            let lines = endpoint.open_lines().into_iter().map(|(_, line)| line);
            tell_all(lines.collect(), &word, deadline);
        }
        let (next, others): (Vec<_>, Vec<_>) = endpoint
            .open_lines()
            .into_iter()
            .partition(|(rank, _)| endpoint.is_neighbour(*rank));
        for lines in [others, next] {
            let lines: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
            leave(&lines, deadline);
        }
    }
}

/// Announces that this rank leaves, and waits until the others have read it.
fn leave(lines: &[Arc<Line>], deadline: Instant) {
    tell_all(lines.to_vec(), &ControlMessage::Leave, deadline);
    for line in lines {
        let _ = line.stream.shutdown(Shutdown::Write);
    }
    for line in lines {
        while !line.has_ended() && clock::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        // Wakes a reader whose peer did not answer.
        let _ = line.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests;
