//! What can go wrong between two ranks.

use crate::busy::Busy;

/// Names one group's queue between two ranks; equal on all members.
pub(crate) type Channel = u64;

/// Why a message could not be had or sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TransportError {
    /// Nothing came, or nothing was taken, in time.
    Timeout,
    /// A rank works on something long and makes no progress.
    Stalled(Box<Busy>),
    /// A rank is gone: the one waited for, or any that died.
    Lost {
        /// The rank that is gone.
        peer: usize,
        /// How it went.
        why: String,
    },
    /// A rank failed and told everybody.
    Aborted {
        /// The rank that failed first.
        by: usize,
        /// What it said.
        reason: String,
    },
}
