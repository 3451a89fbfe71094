use std::{sync::Arc, time::Instant};

use crate::{
    fault::{Channel, TransportError},
    mailbox::Mailbox,
    message::Message,
    transport::{Overdue, Transport},
};

/// Ranks as threads of one process: a message is an `Arc` put into the receiver's mailbox.
#[derive(Debug)]
pub(crate) struct ThreadTransport {
    rank: usize,
    mailboxes: Arc<[Mailbox<Message>]>,
}

impl ThreadTransport {
    /// One end for each of `world_size` ranks.
    pub(crate) fn world(world_size: usize) -> Vec<Self> {
        let mailboxes: Arc<[_]> = (0..world_size).map(|_| Mailbox::default()).collect();
        (0..world_size).map(|rank| Self { rank, mailboxes: mailboxes.clone() }).collect()
    }

    /// Tells the others that this rank finished. Without it they would wait for the timeout.
    pub(crate) fn leave(&self, why: &str) {
        self.others().for_each(|mailbox| mailbox.leave(self.rank, why));
    }

    /// Tells the others that this rank failed or panicked.
    pub(crate) fn die(&self, why: &str) {
        self.others().for_each(|mailbox| mailbox.die(self.rank, why));
    }

    fn others(&self) -> impl Iterator<Item = &Mailbox<Message>> {
        let others = self.mailboxes.iter().enumerate().filter(|(rank, _)| *rank != self.rank);
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

    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        _deadline: Instant,
    ) -> Result<(), TransportError> {
        // A rank that only sends must hear of failures too.
        if let Some(error) = self.gone(to) {
            return Err(error);
        }
        self.mailboxes[to].deliver(self.rank, channel, message);
        Ok(())
    }

    fn say(&self, to: usize, overdue: Overdue) {
        match overdue {
            Overdue::Question => self.mailboxes[to].ask(self.rank),
            Overdue::WaitsToo => self.mailboxes[to].answer(self.rank),
        }
    }

    fn abort(&self, by: usize, reason: &str) {
        // This rank's own mailbox too: its other threads may wait in other groups.
        self.mailboxes.iter().for_each(|mailbox| mailbox.abort(by, reason));
    }
}
