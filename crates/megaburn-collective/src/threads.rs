use std::sync::Arc;

use crate::{
    activity::Activity,
    deadline::Deadline,
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::Message,
    options::GroupOptions,
    transport::{TimeoutProbe, Transport},
};

/// The transport between ranks that are threads of one process: a message is an `Arc` that is put
/// into the receiver's mailbox.
#[derive(Debug)]
pub(crate) struct ThreadTransport {
    rank: usize,
    mailboxes: Arc<[Mailbox<Message>]>,
    activities: Arc<[Arc<Activity>]>,
}

impl ThreadTransport {
    /// Creates one endpoint for each of `world_size` ranks.
    pub(crate) fn world(world_size: usize, options: GroupOptions) -> Vec<Self> {
        let mailboxes: Arc<[_]> = (0..world_size).map(|_| Mailbox::default()).collect();
        let activities: Arc<[_]> = (0..world_size)
            .map(|rank| Activity::new(rank, options))
            .collect();
        let end = |rank| Self {
            rank,
            mailboxes: mailboxes.clone(),
            activities: activities.clone(),
        };
        (0..world_size).map(end).collect()
    }

    /// Notifies the others that this rank finished. Otherwise they would wait until the timeout.
    pub(crate) fn leave(&self, why: &str) {
        self.others()
            .for_each(|mailbox| mailbox.leave(self.rank, why));
    }

    /// Notifies the others that this rank failed or panicked.
    pub(crate) fn die(&self, why: &str) {
        self.others()
            .for_each(|mailbox| mailbox.die(self.rank, why));
    }

    fn others(&self) -> impl Iterator<Item = &Mailbox<Message>> {
        let others = self
            .mailboxes
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != self.rank);
        others.map(|(_, mailbox)| mailbox)
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.len()
    }

    fn mailbox(&self) -> &Mailbox<Message> {
        &self.mailboxes[self.rank]
    }

    fn activity(&self) -> &Arc<Activity> {
        &self.activities[self.rank]
    }

    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        _deadline: Deadline,
    ) -> Result<(), TransportError> {
        // A rank that only sends must learn of failures too.
        if let Some(error) = self.gone(to) {
            return Err(error);
        }
        self.mailboxes[to].deliver(self.rank, channel, message);
        Ok(())
    }

    fn say(&self, to: usize, overdue: TimeoutProbe) {
        match overdue {
            // Answer on behalf of the other rank, which may be working.
            TimeoutProbe::Question => match self.activities[to].busy() {
                Some(busy) => self.mailbox().answer_busy(to, busy),
                None => self.mailboxes[to].ask(self.rank),
            },
            TimeoutProbe::AlsoWaiting => self.mailboxes[to].answer(self.rank),
            TimeoutProbe::Busy(busy) => self.mailboxes[to].answer_busy(self.rank, busy),
        }
    }

    fn abort(&self, by: usize, reason: &str, is_hang: bool) {
        // Include this rank's own mailbox: its other threads may wait in other groups.
        self.mailboxes
            .iter()
            .for_each(|mailbox| mailbox.abort(by, reason, is_hang));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use burn::tensor::{Bytes, DType};

    use super::*;
    use crate::{
        call::{Call, Collective},
        message::Payload,
    };

    const TIME: Duration = Duration::from_secs(2);

    fn message() -> Message {
        let call = Call {
            op: Collective::Send,
            seq: 0,
            dtype: DType::U8,
            shape: vec![1],
        };
        Message {
            call,
            payload: Payload::new(Bytes::from_bytes_vec(vec![7])),
        }
    }

    /// Runs a wait of rank 1 for rank 2 while rank 0 immediately asks rank 1 about a timeout. Rank
    /// 2 sends its message `after` some time, or never. Returns the result of the wait and how long
    /// it took.
    fn asked(after: Option<Duration>) -> (Result<(), TransportError>, Duration) {
        let ranks = ThreadTransport::world(3, GroupOptions::default());
        let begin = Instant::now();
        ranks[0].say(1, TimeoutProbe::Question);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let Some(after) = after else { return };
                std::thread::sleep(after);
                ranks[2]
                    .send(1, 0, message(), Deadline::after(TIME))
                    .unwrap();
            });
            let taken = ranks[1].mailbox().take(2, 0, Deadline::after(TIME));
            (taken.map(drop), begin.elapsed())
        })
    }

    #[test]
    fn who_began_late_waits_on_though_others_time_is_over() {
        assert_eq!(asked(Some(TIME / 8)).0, Ok(()));
    }

    #[test]
    fn who_has_waited_half_its_time_gives_up_with_the_others() {
        let (taken, time) = asked(None);
        assert_eq!(taken, Err(TransportError::Timeout));
        assert!(TIME / 2 <= time && time < TIME, "{time:?}");
    }
}
