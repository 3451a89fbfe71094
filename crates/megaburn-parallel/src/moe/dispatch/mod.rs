//! Rows on their way to the experts' ranks and back.
//!
//! The way there is a linear map that has no numbers of its own: rows are copied, sent and put in
//! order. The way back is its transpose, and so is the backward of either. What is computed between
//! a start and the arrival overlaps with the transfer: the shared expert in the forward pass, the
//! weight gradients of the experts in the backward pass.

mod all_gather;
mod all_to_all;
mod dedup_all_to_all;
mod expert_sorted;
mod in_flight;
mod plan;
mod row_permutation;
mod rows;

use std::{fmt::Debug, sync::Arc};

use all_gather::AllGatherDispatch;
use all_to_all::AllToAllDispatch;
use burn::{
    config::Config,
    tensor::{Float, Int, Tensor},
};
use dedup_all_to_all::DedupAllToAllDispatch;
pub(super) use in_flight::InFlight;
use megaburn_collective::{CollectiveError, region::FAILED_REGION, tensors::AsyncCollective};
use megaburn_kernels::OverlappedWgrads;

use super::ExpertGroups;

/// How tokens get to the ranks of their experts (Megatron's `--moe-token-dispatcher-type`).
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Dispatcher {
    /// Each goes to those ranks only: once to each of them where that is far fewer copies (by the numbers of ranks, of
    /// experts, and of those a token), else once for each expert.
    AllToAll,
    /// All go to all: for few ranks, or tokens that go to many experts. A rank has all tokens of the group then.
    AllGather,
}

/// The way of one pass's tokens to the experts of a layer.
#[derive(Clone, Debug)]
pub(super) struct Dispatch {
    way: Arc<dyn TokenDispatcher>,
    num_slots: usize,
    beside: OverlappedWgrads,
}

/// What a slot, one of the `top_k` of a token, has instead of an expert if it goes to none.
pub(super) const DROPPED: i32 = -1;

/// The experts of all slots.
pub(super) struct Assignments {
    /// `[tokens, top_k]` in i32, off the autodiff device.
    pub(super) experts: Tensor<2, Int>,
    /// What is sent of tokens, `[tokens, d_model]`, likewise.
    pub(super) tokens: Tensor<2>,
    pub(super) num_experts: usize,
    /// Rows that every expert gets, zeros where fewer come; none: those that come.
    pub(super) padded: Option<usize>,
}

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Payload {
    /// A row a token, which goes to all its experts.
    Tokens,
    /// A row a slot.
    Assignments,
}

/// Where it goes; each is the other's transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Experts,
    Tokens,
}

impl Direction {
    fn back(self) -> Self {
        match self {
            Self::Experts => Self::Tokens,
            Self::Tokens => Self::Experts,
        }
    }
}

trait TokenDispatcher: Debug + Send + Sync {
    /// Whether anything is sent that other work can run beside.
    fn sends(&self) -> bool;

    /// Sends what goes to somebody else. (What tokens send may have been taken before: then `x` is not looked at.)
    fn start(
        &self,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<AsyncCollective<2, Float>, CollectiveError>;

    /// What is made of it when it has come.
    fn finish(
        &self,
        came: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Tensor<2>, CollectiveError>;

    /// Rows of each expert of this rank.
    fn rows_per_expert(&self) -> &[usize];
}

impl Dispatch {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other what goes where.
    pub(super) fn new(slots: Assignments, dispatcher: Dispatcher, groups: &ExpertGroups) -> Self {
        let [tokens, top_k] = slots.experts.dims();
        let device = slots.experts.device();
        let num_slots = tokens * top_k;
        let way: Arc<dyn TokenDispatcher> = match dispatcher {
            Dispatcher::AllToAll
                if DedupAllToAllDispatch::pays(slots.num_experts, top_k, groups) =>
            {
                Arc::new(ok(DedupAllToAllDispatch::new(slots, groups, &device)))
            }
            Dispatcher::AllToAll => Arc::new(ok(AllToAllDispatch::new(slots, groups, &device))),
            Dispatcher::AllGather => Arc::new(ok(AllGatherDispatch::new(slots, groups, &device))),
        };
        Self {
            way,
            num_slots,
            beside: OverlappedWgrads::default(),
        }
    }

    /// Rows of each expert of this rank.
    pub(super) fn rows_per_expert(&self) -> &[usize] {
        self.way.rows_per_expert()
    }

    /// Sends each token to the ranks of its experts, and the weight of each slot to where its row goes.
    ///
    /// # Shapes
    /// `[tokens, d_model]` to `[rows, d_model]`; `[tokens, top_k]` to `[rows, 1]`
    pub(super) fn dispatch(&self, x: Tensor<2>, weights: Tensor<2>) -> [InFlight; 2] {
        let weights = weights.reshape([self.num_slots, 1]);
        [(x, Payload::Tokens), (weights, Payload::Assignments)]
            .map(|(x, of)| InFlight::start(self, x, of, Direction::Experts))
    }

    /// The sum of what each token's experts made of it.
    ///
    /// # Shapes
    /// `[rows, d_model]` to `[tokens, d_model]`
    pub(super) fn combine(&self, y: Tensor<2>) -> Tensor<2> {
        InFlight::start(self, y, Payload::Tokens, Direction::Tokens).wait()
    }

    /// What shall be computed beside what backward sends from the experts, if it sends anything.
    pub(super) fn beside(&self) -> Option<&OverlappedWgrads> {
        self.way.sends().then_some(&self.beside)
    }
}

/// What is sent while tensors are computed fails as a region does.
fn ok<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"))
}
