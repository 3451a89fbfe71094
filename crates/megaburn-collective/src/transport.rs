use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    activity::Activity,
    busy::{Busy, Place},
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::Message,
};

/// How long a rank whose wait timed out waits for its peer's answer. Once that peer answers that it
/// is waiting as well, also how long the rank waits for a report that names the cause.
const GRACE: Duration = Duration::from_millis(500);
/// The interval at which a rank repeats its question while its peer is in a long phase.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// A busy rank that has not answered repeated questions for this long counts as silent. A single
/// answer may be lost or late.
pub(crate) const SILENT: Duration = Duration::from_secs(4);

/// The messages that two ranks exchange about a wait that took too long.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum TimeoutProbe {
    /// The sender's wait for the receiver timed out.
    Question,
    /// The sender is waiting for another rank itself.
    AlsoWaiting,
    /// The sender is in a long phase, or waits for a rank that is.
    Busy(Busy),
}

/// The result of asking a rank about a wait that took too long.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The awaited message, which arrived after all.
    Message(Message),
    Busy(Busy),
    /// The peer is waiting as well, and no rank was reported as the cause.
    AlsoWaiting,
    /// No answer.
    Nothing,
}

/// Moves messages between the ranks of a world. Everything else (collectives, checks, errors) is
/// built once on top of it, for every transport.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// The mailbox in which this rank's messages arrive.
    fn mailbox(&self) -> &Mailbox<Message>;

    /// The current activity of this rank.
    fn activity(&self) -> &Arc<Activity>;

    /// Queues `message` for rank `to`. Messages of one channel from one rank arrive in order.
    ///
    /// # Errors
    /// `to` is gone, some rank failed, or `to` accepts nothing until `deadline`. In the second half
    /// of the deadline, another rank's timeout on this one ends the wait early.
    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        deadline: Deadline,
    ) -> Result<(), TransportError>;

    /// Whether a message to rank `peer` can be sent without first opening a connection. If not, one
    /// is opened in the background; it also brings the news that the rank has ended.
    fn reach(&self, _peer: usize) -> bool {
        true
    }

    /// Sends `overdue` to rank `to`, but only if that does not block.
    fn say(&self, to: usize, overdue: TimeoutProbe);

    /// Reports to every rank that rank `by` (this one or one that reported to it) failed first;
    /// their waits end with [`TransportError::Aborted`]. Never blocks for long.
    fn abort(&self, by: usize, reason: &str, is_hang: bool);

    /// Receives the next message of `channel` from rank `from`.
    ///
    /// When one rank stalls, everything that waits for it, directly or not, times out at nearly the
    /// same moment. So a rank whose wait timed out first asks `from`, which may answer in two ways:
    ///
    /// - It is waiting itself: then it is not to blame, and the root cause arrives as a failure of
    ///   all ranks.
    /// - It is in a long phase (see [`Activity`]): then this rank keeps waiting as long as that
    ///   phase makes progress, and forwards this answer to ranks that wait for itself. It repeats
    ///   its question every second and gives up after [`SILENT`] without an answer. If it has just
    ///   left the phase, the limit of collectives applies from then on.
    ///
    /// # Errors
    /// `from` is gone or in a long phase without progress, some rank failed, or no message arrived
    /// until `deadline`. In the second half of the deadline, another rank's timeout on this one
    /// ends the wait early.
    fn receive(
        &self,
        from: usize,
        channel: Channel,
        mut deadline: Deadline,
    ) -> Result<Message, TransportError> {
        let mut worked: Option<Instant> = None;
        self.reach(from);
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
                    // A rank that has left its phase stops answering at the limit of collectives:
                    // then its silence is no lost answer.
                    worked = (busy.place != Place::Left).then(clock::now);
                    deadline = Deadline::extended(busy.left().min(ASK_AGAIN));
                    continue;
                }
                // Wait longer, so that a rank that waits directly for the silent one is the first
                // to name it.
                Answer::AlsoWaiting => SILENT + 2 * GRACE,
                Answer::Nothing => SILENT,
            };
            if worked.is_none_or(|worked| clock::now() >= worked + patience) {
                return Err(TransportError::Timeout);
            }
        }
    }

    /// Asks rank `from` why its message of `channel` does not arrive.
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

    /// Returns a message of `channel` from rank `from`, if one has arrived.
    #[cfg(any(feature = "cuda", test))]
    fn arrived(&self, from: usize, channel: Channel) -> Option<Message> {
        self.mailbox()
            .take(from, channel, Deadline::after(Duration::ZERO))
            .ok()
    }

    /// Whether the other ranks do not run ([`Group::rehearsal`](crate::Group::rehearsal)).
    fn is_rehearsal(&self) -> bool {
        false
    }

    /// Keeps the members of a new group, if the other ranks do not run.
    fn note_group(&self, _name: &str, _members: &[usize]) {}

    /// The groups that were noted.
    fn noted_groups(&self) -> BTreeMap<String, Vec<usize>> {
        BTreeMap::new()
    }

    /// Why `peer` can no longer be reached, if it cannot. For this rank itself: the first failure
    /// of any rank that was reported to it. Non-blocking, for callers that are waiting on something
    /// other than a message, e.g. the GPU.
    fn gone(&self, peer: usize) -> Option<TransportError> {
        self.mailbox().gone(peer)
    }
}
