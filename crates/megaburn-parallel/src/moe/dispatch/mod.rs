//! Rows on their way to the experts' ranks and back.
//!
//! The way there is a linear map that has no numbers of its own: rows are copied, sent and put in order. The way
//! back is its transpose, and so is the backward of either. What is computed between a start and the arrival runs
//! beside what is sent: the shared expert forward, products that give experts' weights their gradients backward,
//! and both ways a share of the products that were put off in other passes ([`Spare`](megaburn_kernels::Spare)).

mod arranged;
mod exchanged;
mod gathered;
mod on_the_way;
mod once;
mod plan;
mod rows;
mod sorted;

use std::{fmt::Debug, sync::Arc};

use burn::{
    config::Config,
    tensor::{Float, Int, Tensor},
};
use exchanged::Exchanged;
use gathered::Gathered;
use megaburn_collective::{CollectiveError, region::FAILED_REGION, tensors::Pending};
use megaburn_kernels::Beside;
pub(super) use on_the_way::OnTheWay;
use once::Once;

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
    way: Arc<dyn Way>,
    num_slots: usize,
    beside: Beside,
}

/// What a slot, one of the `top_k` of a token, has instead of an expert if it goes to none.
pub(super) const DROPPED: i32 = -1;

/// The experts of all slots.
pub(super) struct Slots {
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
enum Of {
    /// A row a token, which goes to all its experts.
    Tokens,
    /// A row a slot.
    Slots,
}

/// Where it goes; each is the other's transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Experts,
    Tokens,
}

impl To {
    fn back(self) -> Self {
        match self {
            Self::Experts => Self::Tokens,
            Self::Tokens => Self::Experts,
        }
    }
}

trait Way: Debug + Send + Sync {
    /// Whether anything is sent that other work can run beside.
    fn sends(&self) -> bool;

    /// Sends what goes to somebody else. (What tokens send may have been taken before: then `x` is not looked at.)
    fn start(&self, x: Tensor<2>, of: Of, to: To) -> Result<Pending<2, Float>, CollectiveError>;

    /// What is made of it when it has come.
    fn finish(&self, came: Tensor<2>, of: Of, to: To) -> Result<Tensor<2>, CollectiveError>;

    /// Rows of each expert of this rank.
    fn rows_of_experts(&self) -> &[usize];
}

impl Dispatch {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other what goes where.
    pub(super) fn new(slots: Slots, dispatcher: Dispatcher, groups: &ExpertGroups) -> Self {
        let ([tokens, top_k], device) = (slots.experts.dims(), slots.experts.device());
        let num_slots = tokens * top_k;
        let way: Arc<dyn Way> = match dispatcher {
            Dispatcher::AllToAll if Once::pays(slots.num_experts, top_k, groups) => {
                Arc::new(ok(Once::new(slots, groups, &device)))
            }
            Dispatcher::AllToAll => Arc::new(ok(Exchanged::new(slots, groups, &device))),
            Dispatcher::AllGather => Arc::new(ok(Gathered::new(slots, groups, &device))),
        };
        Self {
            way,
            num_slots,
            beside: Beside::default(),
        }
    }

    /// Rows of each expert of this rank.
    pub(super) fn rows_of_experts(&self) -> &[usize] {
        self.way.rows_of_experts()
    }

    /// Sends each token to the ranks of its experts, and the weight of each slot to where its row goes.
    ///
    /// # Shapes
    /// `[tokens, d_model]` to `[rows, d_model]`; `[tokens, top_k]` to `[rows, 1]`
    pub(super) fn start_there(&self, x: Tensor<2>, weights: Tensor<2>) -> [OnTheWay; 2] {
        let weights = weights.reshape([self.num_slots, 1]);
        [(x, Of::Tokens), (weights, Of::Slots)]
            .map(|(x, of)| OnTheWay::start(self, x, of, To::Experts))
    }

    /// The sum of what each token's experts made of it.
    ///
    /// # Shapes
    /// `[rows, d_model]` to `[tokens, d_model]`
    pub(super) fn rows_back(&self, y: Tensor<2>) -> Tensor<2> {
        OnTheWay::start(self, y, Of::Tokens, To::Tokens).arrived()
    }

    /// What shall be computed beside what backward sends from the experts, if it sends anything.
    pub(super) fn beside(&self) -> Option<&Beside> {
        self.way.sends().then_some(&self.beside)
    }
}

/// What is sent while tensors are computed fails as a region does.
fn ok<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"))
}
