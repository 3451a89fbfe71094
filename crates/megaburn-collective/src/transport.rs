use std::{fmt, time::Instant};

use crate::message::Message;

/// Names one group's queue between two ranks; equal on all members.
pub type Channel = u64;

/// Why a message could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportError {
    /// Nothing came in time.
    Timeout,
    /// The peer is gone.
    Lost {
        /// How it went.
        why: String,
    },
    /// A rank failed and told everybody.
    Aborted {
        /// The rank that failed.
        by: usize,
        /// What it said.
        reason: String,
    },
}

/// Moves messages between the ranks of a world. Everything else (collectives, checks, errors) is
/// built on it once, for every transport.
pub trait Transport: fmt::Debug + Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Queues `message` for rank `to`. Messages of one channel from one rank arrive in order.
    ///
    /// # Errors
    /// `to` is gone, or takes nothing until `deadline`.
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
    /// None came until `deadline`, `from` is gone, or some rank aborted.
    fn receive(
        &self,
        from: usize,
        channel: Channel,
        deadline: Instant,
    ) -> Result<Message, TransportError>;

    /// Tells every rank that this one failed; what they wait for ends with
    /// [`TransportError::Aborted`]. Never blocks for long.
    fn abort(&self, reason: &str);
}
