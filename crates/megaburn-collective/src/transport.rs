use std::{fmt, time::Instant};

use crate::{
    fault::{Channel, TransportError},
    message::Message,
};

/// Moves messages between the ranks of a world. Everything else (collectives, checks, errors) is
/// built on it once, for every transport.
pub(crate) trait Transport: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Queues `message` for rank `to`. Messages of one channel from one rank arrive in order.
    ///
    /// # Errors
    /// `to` is gone, takes nothing until `deadline`, or some rank failed.
    fn send(
        &self,
        to: usize,
        channel: Channel,
        message: Message,
        deadline: Instant,
    ) -> Result<(), TransportError>;

    /// The next message of `channel` from rank `from`.
    ///
    /// # Errors
    /// None came until `deadline`, `from` is gone, or some rank failed.
    fn receive(
        &self,
        from: usize,
        channel: Channel,
        deadline: Instant,
    ) -> Result<Message, TransportError>;

    /// Why `peer` can no longer be talked to, if it cannot; of this rank itself, the first failure of
    /// any rank that it heard of. Never blocks: for who waits for something else than a message.
    fn gone(&self, peer: usize) -> Option<TransportError>;

    /// Tells every rank that rank `by` failed first, this one or one that it heard of; what they
    /// wait for ends with [`TransportError::Aborted`]. Never blocks for long.
    fn abort(&self, by: usize, reason: &str);
}
