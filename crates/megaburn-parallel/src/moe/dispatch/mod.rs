//! Rows on their way to the experts' ranks and back.
//!
//! The way there is a linear map that has no numbers of its own: rows are copied, sent and put in order. The way
//! back is its transpose, and so is the backward of either.

mod exchanged;
mod gathered;
mod plan;
mod rows;
mod sorted;

use std::{fmt::Debug, sync::Arc};

use burn::{
    config::Config,
    tensor::{Int, Tensor},
};
use exchanged::Exchanged;
use gathered::Gathered;
use megaburn_collective::{CollectiveError, region::FAILED_REGION};
use megaburn_kernels::Operands;
use rows::as_row;

use super::ExpertGroups;

/// How tokens get to the ranks of their experts (Megatron's `--moe-token-dispatcher-type`).
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Dispatcher {
    /// Each goes to those ranks only.
    AllToAll,
    /// All go to all: for few ranks, or tokens that go to many experts. A rank has all tokens of the group then.
    AllGather,
}

/// The way of one pass's tokens to the experts of a layer.
#[derive(Clone, Debug)]
pub(super) struct Dispatch {
    way: Arc<dyn Way>,
    num_slots: usize,
}

/// What a slot, one of the `top_k` of a token, has instead of an expert if it goes to none.
pub(super) const DROPPED: i32 = -1;

/// The experts of all slots.
pub(super) struct Slots {
    /// `[tokens, top_k]` in i32, off the autodiff device.
    pub(super) experts: Tensor<2, Int>,
    pub(super) num_experts: usize,
    /// Rows that every expert gets, zeros where fewer come; none: those that come.
    pub(super) padded: Option<usize>,
}

/// What is sent.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// A row a token, which goes to all its experts.
    Tokens,
    /// A row a slot.
    Slots,
}

trait Way: Debug + Send + Sync {
    /// To the experts' rows.
    fn there(&self, x: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError>;

    /// Its transpose.
    fn back(&self, y: Tensor<2>, of: Of) -> Result<Tensor<2>, CollectiveError>;

    /// Rows of each expert of this rank.
    fn rows_of_experts(&self) -> &[usize];
}

impl Dispatch {
    /// # Collective
    /// All ranks of `groups.experts`, which tell each other what goes where.
    pub(super) fn new(slots: Slots, dispatcher: Dispatcher, groups: &ExpertGroups) -> Self {
        let num_slots = slots.experts.dims().iter().product();
        let device = slots.experts.device();
        let way: Arc<dyn Way> = match dispatcher {
            Dispatcher::AllToAll => Arc::new(ok(Exchanged::new(slots, groups, &device))),
            Dispatcher::AllGather => Arc::new(ok(Gathered::new(slots, groups, &device))),
        };
        Self { way, num_slots }
    }

    /// Rows of each expert of this rank.
    pub(super) fn rows_of_experts(&self) -> &[usize] {
        self.way.rows_of_experts()
    }

    /// Each token to the ranks of its experts.
    ///
    /// # Shapes
    /// `[tokens, d_model]` to `[rows, d_model]`
    pub(super) fn rows_there(&self, x: Tensor<2>) -> Tensor<2> {
        self.moved(x, Of::Tokens, true)
    }

    /// The sum of what each token's experts made of it.
    ///
    /// # Shapes
    /// `[rows, d_model]` to `[tokens, d_model]`
    pub(super) fn rows_back(&self, y: Tensor<2>) -> Tensor<2> {
        self.moved(y, Of::Tokens, false)
    }

    /// The weight of each slot to where its row goes.
    ///
    /// # Shapes
    /// `[tokens, top_k]` to `[rows]`
    pub(super) fn weights_there(&self, weights: Tensor<2>) -> Tensor<1> {
        self.moved(weights.reshape([self.num_slots, 1]), Of::Slots, true).squeeze_dim(1)
    }

    fn moved(&self, x: Tensor<2>, of: Of, there: bool) -> Tensor<2> {
        let way = self.way.clone();
        let go = move |x: Tensor<2>, there: bool| {
            ok(if there { way.there(x, of) } else { way.back(x, of) })
        };
        let device = x.device();
        if !device.is_autodiff() {
            return go(x, there);
        }
        let y = go(x.clone().inner(), there);
        let mut operands = Operands::new(&device);
        operands.add(x);
        let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
            vec![Some(as_row(go(dy.expect("backward came from it"), !there)))]
        });
        y
    }
}

/// What is sent while tensors are computed fails as a region does.
fn ok<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"))
}
