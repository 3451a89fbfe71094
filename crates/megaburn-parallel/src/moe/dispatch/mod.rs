//! Dispatch of rows to the experts' ranks, and combine.
//!
//! Dispatch is a linear map that has no numbers of its own: rows are copied, sent and put in order.
//! Combine is its transpose; the backward of each is the other. What is computed between a start and
//! the arrival overlaps with the transfer: the shared expert in the forward pass, the weight gradients
//! of the experts in the backward pass.

mod all_gather;
mod all_to_all;
mod dedup_all_to_all;
mod expert_sorted;
mod in_flight;
mod plan;
mod row_permutation;
mod rows;
mod token_dispatcher;

use std::sync::Arc;

use all_gather::AllGatherDispatch;
use all_to_all::AllToAllDispatch;
use burn::tensor::Tensor;
use dedup_all_to_all::DedupAllToAllDispatch;
pub(super) use in_flight::InFlight;
use megaburn_autograd::OverlappedWgrads;
use megaburn_collective::region::unwrap_collective;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub(super) use token_dispatcher::{Assignments, DROPPED};
use token_dispatcher::{Direction, Payload, TokenDispatcher};

use super::ExpertGroups;

/// How tokens get to the ranks of their experts (Megatron's `--moe-token-dispatcher-type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(JsonSchema)]
pub enum Dispatcher {
    /// Sends tokens only to the ranks of their experts: once to each rank where that means far
    /// fewer copies (given the numbers of ranks, experts, and experts per token), else once for
    /// each expert.
    #[default]
    AllToAll,
    /// Sends all tokens to all ranks; for few ranks, or for tokens that go to many experts. Each
    /// rank then holds all tokens of the group.
    AllGather,
}

/// The dispatch of one pass's tokens to the experts of a layer.
#[derive(Clone, Debug)]
pub(super) struct Dispatch {
    dispatcher: Arc<dyn TokenDispatcher>,
    num_assignments: usize,
    overlapped_wgrads: OverlappedWgrads,
}

impl Dispatch {
    /// Plans the dispatch.
    ///
    /// # Collective
    /// All ranks of `groups.experts`, which exchange the numbers of rows.
    pub(super) fn new(assignments: Assignments, kind: Dispatcher, groups: &ExpertGroups) -> Self {
        let [tokens, top_k] = assignments.experts.dims();
        let device = assignments.experts.device();
        let num_assignments = tokens * top_k;
        let dispatcher: Arc<dyn TokenDispatcher> = match kind {
            Dispatcher::AllToAll
                if DedupAllToAllDispatch::is_cheaper(assignments.num_experts, top_k, groups) =>
            {
                Arc::new(unwrap_collective(DedupAllToAllDispatch::new(
                    assignments,
                    groups,
                    &device,
                )))
            }
            Dispatcher::AllToAll => Arc::new(unwrap_collective(AllToAllDispatch::new(
                assignments,
                groups,
                &device,
            ))),
            Dispatcher::AllGather => Arc::new(unwrap_collective(AllGatherDispatch::new(
                assignments,
                groups,
                &device,
            ))),
        };
        Self {
            dispatcher,
            num_assignments,
            overlapped_wgrads: OverlappedWgrads::default(),
        }
    }

    /// Rows of each expert of this rank.
    pub(super) fn rows_per_expert(&self) -> &[usize] {
        self.dispatcher.rows_per_expert()
    }

    /// Sends each token to the ranks of its experts, and the weight of each assignment along with
    /// its row.
    ///
    /// # Shapes
    /// `[tokens, d_model]` to `[rows, d_model]`; `[tokens, top_k]` to `[rows, 1]`
    pub(super) fn dispatch(&self, x: Tensor<2>, weights: Tensor<2>) -> [InFlight; 2] {
        let weights = weights.reshape([self.num_assignments, 1]);
        [(x, Payload::Tokens), (weights, Payload::Assignments)]
            .map(|(x, payload)| self.start(x, payload, Direction::Dispatch))
    }

    /// Sums the outputs of each token's experts.
    ///
    /// # Shapes
    /// `[rows, d_model]` to `[tokens, d_model]`
    pub(super) fn combine(&self, y: Tensor<2>) -> Tensor<2> {
        self.start(y, Payload::Tokens, Direction::Combine).wait()
    }

    fn start(&self, x: Tensor<2>, payload: Payload, direction: Direction) -> InFlight {
        let dispatcher = self.dispatcher.clone();
        InFlight::start(dispatcher, &self.overlapped_wgrads, x, payload, direction)
    }

    /// The weight-gradient GEMMs that overlap the transfers of backward; `None` if nothing is sent.
    pub(super) fn overlapped_wgrads(&self) -> Option<&OverlappedWgrads> {
        self.dispatcher.sends().then_some(&self.overlapped_wgrads)
    }
}
