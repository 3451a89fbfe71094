//! What the ways of dispatching have in common: rows go to experts, and back by the transpose.

use std::fmt::Debug;

use burn::tensor::{Int, Tensor};
use megaburn_collective::{CollectiveError, tensors::Work};

/// The value of a slot, one of the `top_k` of a token, that goes to no expert.
pub(in crate::moe) const DROPPED: i32 = -1;

/// The experts of all slots.
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
    /// One row per slot.
    Assignments,
}

/// Where rows are sent; each direction is the transpose of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Dispatch,
    Combine,
}

impl Direction {
    pub(super) fn back(self) -> Self {
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

    /// Starts the transfer. `x` is ignored if the token rows were gathered early.
    fn start(
        &self,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Work<Tensor<2>>, CollectiveError>;

    /// Finishes the transfer with the received rows.
    fn finish(
        &self,
        came: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Tensor<2>, CollectiveError>;

    /// Rows of each expert of this rank.
    fn rows_per_expert(&self) -> &[usize];
}
