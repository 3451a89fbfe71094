use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    activity::Activity,
    busy::Busy,
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::Message,
};

/// How long a rank whose time is over waits for the answer of the peer it waited for, and, once that
/// peer answered that it waits as well, for the news of who is to blame.
const GRACE: Duration = Duration::from_millis(500);
/// How often a rank asks again while the one it waits for works.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// A rank that works and was asked again and again for so long without an answer is silent: a single
/// answer may be lost or late.
pub(crate) const SILENT: Duration = Duration::from_secs(4);

/// What two ranks say about a wait that took too long.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum TimeoutProbe {
    /// The sender's time is over, and it waits for the receiver.
    Question,
    /// The sender waits for another rank itself.
    AlsoWaiting,
    /// The sender works on something long, or waits for a rank that does.
    Busy(Busy),
}

/// What came of a question to a rank that was waited for too long.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Its message, which came after all.
    Message(Message),
    Busy(Busy),
    /// It waits as well, and nobody said for whom.
    AlsoWaiting,
    /// None.
    Nothing,
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

    /// What this rank is at.
    fn activity(&self) -> &Arc<Activity>;

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
    fn say(&self, to: usize, overdue: TimeoutProbe);

    /// Tells every rank that rank `by` failed first, this one or one that it heard of; what they
    /// wait for ends with [`TransportError::Aborted`]. Never blocks for long.
    fn abort(&self, by: usize, reason: &str);

    /// The next message of `channel` from rank `from`.
    ///
    /// One stopped rank makes everybody's time run out at nearly the same moment, that of ranks too
    /// that only wait for one who waits. So a rank whose time is over asks its peer first. One that
    /// answers that it waits is not to blame, and whom it waits for in vain comes as the failure of
    /// all. One that answers that it works (see [`Activity`]) is waited for further, as long as it
    /// makes progress, and who waits passes that answer on. It is asked again every second, and
    /// given up when it has not answered for [`SILENT`].
    ///
    /// # Errors
    /// None came until `deadline` (or until another rank's is over, once half of this one is), `from`
    /// works without progress, it is gone, or some rank failed.
    fn receive(
        &self,
        from: usize,
        channel: Channel,
        mut deadline: Deadline,
    ) -> Result<Message, TransportError> {
        let mut worked: Option<Instant> = None;
        loop {
            let arrived = self.mailbox().take(from, channel, deadline);
            if !matches!(arrived, Err(TransportError::Timeout)) {
                return arrived;
            }
            let patience = match self.ask(from, channel)? {
                Answer::Message(message) => return Ok(message),
                Answer::Busy(busy) if busy.left().is_zero() => {
                    return Err(TransportError::Stalled(Box::new(busy)));
                }
                Answer::Busy(busy) => {
                    worked = Some(clock::now());
                    deadline = Deadline::extended(busy.left().min(ASK_AGAIN));
                    continue;
                }
                // Whoever waits for the silent rank itself is the first to name it.
                Answer::AlsoWaiting => SILENT + 2 * GRACE,
                Answer::Nothing => SILENT,
            };
            if worked.is_none_or(|worked| clock::now() >= worked + patience) {
                return Err(TransportError::Timeout);
            }
        }
    }

    /// Asks rank `from` why its message of `channel` does not come.
    fn ask(&self, from: usize, channel: Channel) -> Result<Answer, TransportError> {
        let mailbox = self.mailbox();
        mailbox.forget_answers(from);
        self.say(from, TimeoutProbe::Question);
        let mut until = clock::now() + GRACE;
        let mut answered = false;
        let mut asked_by = Vec::new();
        loop {
            let heard = mailbox.wait_overdue(from, channel, answered, until);
            for &asking in &heard.asked_by {
                self.say(asking, TimeoutProbe::AlsoWaiting);
            }
            asked_by.extend(heard.asked_by);
            if let Some(message) = heard.message {
                return Ok(Answer::Message(message));
            }
            if let Some(failure) = heard.failure {
                return Err(failure);
            }
            if let Some(busy) = heard.busy {
                for asking in asked_by {
                    self.say(asking, TimeoutProbe::Busy(busy.clone()));
                }
                return Ok(Answer::Busy(busy));
            }
            if heard.also_waiting && !answered {
                answered = true;
                until += GRACE;
            }
            if clock::now() >= until {
                return Ok(if answered {
                    Answer::AlsoWaiting
                } else {
                    Answer::Nothing
                });
            }
        }
    }

    /// A message of `channel` from rank `from`, if one has arrived.
    #[cfg(any(feature = "cuda", test))]
    fn arrived(&self, from: usize, channel: Channel) -> Option<Message> {
        self.mailbox()
            .take(from, channel, Deadline::after(Duration::ZERO))
            .ok()
    }

    /// Why `peer` can no longer be talked to, if it cannot; of this rank itself, the first failure of
    /// any rank that it heard of. Never blocks: for who waits for something else than a message.
    fn gone(&self, peer: usize) -> Option<TransportError> {
        self.mailbox().gone(peer)
    }
}
