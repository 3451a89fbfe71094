//! What all dispatchers have in common: rows go to experts, and back by the transpose.

use std::fmt::Debug;

use burn::tensor::{Int, Tensor};
use megaburn_collective::{CollectiveError, tensors::Work};

/// The value of an assignment that goes to no expert.
pub(in crate::moe) const DROPPED: i32 = -1;

/// The `top_k` experts of each token.
pub(in crate::moe) struct Assignments {
    /// `[tokens, top_k]` in i32, off the autodiff device.
    pub(in crate::moe) experts: Tensor<2, Int>,
    /// The tokens to dispatch, `[tokens, d_model]`, off the autodiff device.
    pub(in crate::moe) tokens: Tensor<2>,
    pub(in crate::moe) num_experts: usize,
    /// Rows of every expert, padded with zeros; `None` means the rows that arrive.
    pub(in crate::moe) padded: Option<usize>,
}

/// The kind of rows that are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    /// One row per token, which goes to all of its experts.
    Tokens,
    /// One row per assignment.
    Assignments,
}

/// Where rows are sent; each direction is the transpose of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Dispatch,
    Combine,
}

impl Direction {
    pub(super) fn transposed(self) -> Self {
        match self {
            Self::Dispatch => Self::Combine,
            Self::Combine => Self::Dispatch,
        }
    }
}

/// A path of rows to the ranks of their experts and back.
pub(super) trait TokenDispatcher: Debug + Send + Sync {
    /// Whether anything is sent that other work can overlap.
    fn sends(&self) -> bool;

    /// Starts to send rows to the ranks of their experts. `x` is ignored if the token rows were
    /// gathered early.
    fn start_dispatch(
        &self,
        x: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError>;

    /// Orders the received rows expert by expert.
    fn finish_dispatch(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError>;

    /// Starts to send rows back. Together with [`finish_combine`](Self::finish_combine) it sums the
    /// rows of each token, or orders them by assignment; which of the two sums depends on the
    /// dispatcher.
    fn start_combine(
        &self,
        y: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError>;

    /// Turns the received rows into the result: see [`start_combine`](Self::start_combine).
    fn finish_combine(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError>;

    /// Rows of each expert of this rank.
    fn rows_per_expert(&self) -> &[usize];

    /// Starts the transfer in this direction.
    fn start(
        &self,
        x: Tensor<2>,
        payload: Payload,
        direction: Direction,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        match direction {
            Direction::Dispatch => self.start_dispatch(x, payload),
            Direction::Combine => self.start_combine(x, payload),
        }
    }

    /// Finishes the transfer in this direction with the received rows.
    fn finish(
        &self,
        received: Tensor<2>,
        payload: Payload,
        direction: Direction,
    ) -> Result<Tensor<2>, CollectiveError> {
        match direction {
            Direction::Dispatch => self.finish_dispatch(received, payload),
            Direction::Combine => self.finish_combine(received, payload),
        }
    }
}
