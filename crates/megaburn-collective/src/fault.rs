//! Failures of the transport between two ranks.

use crate::busy::Busy;

/// Identifies one group's queue between two ranks; equal on all members.
pub(crate) type Channel = u64;

/// Why a message could not be received or sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TransportError {
    /// Nothing was received, or the peer accepted nothing, in time.
    Timeout,
    /// A rank in a long phase makes no progress.
    Stalled(Box<Busy>),
    /// A rank is gone: the peer of this wait, or any rank that died.
    Lost {
        /// The rank that is gone.
        peer: usize,
        /// How it ended.
        why: String,
    },
    /// A rank failed and reported it to all ranks.
    Aborted {
        /// The rank that failed first.
        by: usize,
        /// The reason that it gave.
        reason: String,
        /// Whether ranks hang or disagree.
        is_hang: bool,
    },
}
