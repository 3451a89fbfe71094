use std::{
    fmt,
    time::{Duration, Instant},
};

use crate::{
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::Message,
};

/// How long a rank whose time is over waits for the answer of the peer it waited for, and, once that
/// peer answered that it waits as well, for the news of who is to blame.
const GRACE: Duration = Duration::from_millis(500);

/// What two ranks say about a wait that took too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Overdue {
    /// The sender's time is over, and it waits for the receiver.
    Question,
    /// The sender waits for another rank itself.
    WaitsToo,
}

/// Moves messages between the ranks of a world. Everything else (collectives, checks, errors) is
/// built on it once, for every transport.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Where this rank's messages arrive.
    fn mailbox(&self) -> &Mailbox<Message>;

    /// Queues `message` for rank `to`. Messages of one channel from one rank arrive in order.
    ///
    /// # Errors
    /// `to` is gone, takes nothing until `deadline` (or until another rank's is over, once half of
    /// this one is), or some rank failed.
    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        deadline: Deadline,
    ) -> Result<(), TransportError>;

    /// Says `overdue` to rank `to`, if it takes a word at once.
    fn say(&self, to: usize, overdue: Overdue);

    /// Tells every rank that rank `by` failed first, this one or one that it heard of; what they
    /// wait for ends with [`TransportError::Aborted`]. Never blocks for long.
    fn abort(&self, by: usize, reason: &str);

    /// The next message of `channel` from rank `from`.
    ///
    /// One stopped rank makes everybody's time run out at nearly the same moment, that of ranks too
    /// that only wait for one who waits. So a rank whose time is over asks its peer first; one that
    /// answers is not to blame, and whom it waits for in vain comes as the failure of all.
    ///
    /// # Errors
    /// None came until `deadline` (or until another rank's is over, once half of this one is), `from`
    /// is gone, or some rank failed.
    fn receive(
        &self,
        from: usize,
        channel: Channel,
        deadline: Deadline,
    ) -> Result<Message, TransportError> {
        let mailbox = self.mailbox();
        let arrived = mailbox.take(from, channel, deadline);
        if !matches!(arrived, Err(TransportError::Timeout)) {
            return arrived;
        }
        self.say(from, Overdue::Question);
        let mut until = Instant::now() + GRACE;
        let mut answered = false;
        loop {
            let heard = mailbox.wait_overdue(from, answered, until);
            for asking in heard.asked_by {
                self.say(asking, Overdue::WaitsToo);
            }
            if let Some(failure) = heard.failure {
                return Err(failure);
            }
            if heard.waits_too && !answered {
                answered = true;
                until += GRACE;
            }
            if Instant::now() >= until {
                return Err(TransportError::Timeout);
            }
        }
    }

    /// A message of `channel` from rank `from`, if one has arrived.
    #[cfg(any(feature = "cuda", test))]
    fn arrived(&self, from: usize, channel: Channel) -> Option<Message> {
        self.mailbox().take(from, channel, Deadline::after(Duration::ZERO)).ok()
    }

    /// Why `peer` can no longer be talked to, if it cannot; of this rank itself, the first failure of
    /// any rank that it heard of. Never blocks: for who waits for something else than a message.
    fn gone(&self, peer: usize) -> Option<TransportError> {
        self.mailbox().gone(peer)
    }
}
