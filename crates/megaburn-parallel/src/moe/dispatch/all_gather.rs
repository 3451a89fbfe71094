use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{
    CollectiveError, Group, Lane, ReduceOp,
    tensors::{self, Work},
};

use super::{
    expert_sorted::{ExpertSorted, PendingCounts},
    plan::Order,
    row_permutation::RowPermutation,
    rows::{exchange_counts, index, pad_rows, truncate_rows},
    token_dispatcher::{Assignments, DROPPED, Payload, TokenDispatcher},
};
use crate::moe::ExpertGroups;

/// All-gathers all tokens. Each rank selects the tokens of its experts, and the sums of their
/// outputs are reduce-scattered.
#[derive(Debug)]
pub(super) struct AllGatherDispatch {
    permutation: ExpertSorted,
    rows_per_expert: Vec<usize>,
    /// The permutation that inserts padding, if there is any.
    padding: Option<RowPermutation>,
    top_k: usize,
    /// Number of tokens on this rank, and the largest number on any rank, to which all ranks pad
    /// for the all-gather.
    tokens: usize,
    padded_tokens: usize,
    groups: ExpertGroups,
}

impl AllGatherDispatch {
    /// Gathers the experts of all tokens.
    ///
    /// # Collective
    /// All ranks of `groups.experts`.
    pub(super) fn new(
        assignments: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let [tokens, top_k] = assignments.experts.dims();
        let padded_tokens = match groups.experts.size() {
            1 => tokens,
            _ => {
                let (all, ()) = exchange_counts(index([tokens], device), &groups.experts, || ())?;
                all.into_iter()
                    .max()
                    .expect("the group has at least one rank")
            }
        };
        let own = groups.own(assignments.num_experts);
        let all = with_remote_experts(assignments.experts, padded_tokens);
        let all = tensors::all_gather(all, &groups.experts, Lane::InOrder)?.wait();
        // Ids of remote experts are out of range after this and drop out.
        let all = if padded_tokens == 0 {
            all
        } else {
            all - own.start as i32
        };
        let permutation = PendingCounts::new(all, own.len());
        let (counts, ()) = exchange_counts(permutation.counts(), &Group::single(0), || ())?;
        let order = Order::identity(counts.clone());
        let order = match assignments.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            permutation: permutation.with_rows(counts.iter().sum()),
            padding: RowPermutation::new(&order, device),
            rows_per_expert: order.rows,
            top_k,
            tokens,
            padded_tokens,
            groups: groups.clone(),
        })
    }

    /// Rows of this payload on this rank, and after padding for the all-gather.
    fn lens(&self, payload: Payload) -> [usize; 2] {
        let rows_per_token = match payload {
            Payload::Tokens => 1,
            Payload::Assignments => self.top_k,
        };
        [self.tokens, self.padded_tokens].map(|tokens| tokens * rows_per_token)
    }
}

impl TokenDispatcher for AllGatherDispatch {
    fn sends(&self) -> bool {
        self.groups.experts.size() > 1
    }

    fn start_dispatch(
        &self,
        x: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let [_, padded_rows] = self.lens(payload);
        let rows = pad_rows(x, padded_rows);
        tensors::all_gather(rows, &self.groups.experts, Lane::Overlapped)
    }

    fn finish_dispatch(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        let rows = self.permutation.permute(received, payload);
        Ok(match &self.padding {
            Some(padding) => padding.permute(rows),
            None => rows,
        })
    }

    fn start_combine(
        &self,
        y: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let rows = match &self.padding {
            Some(padding) => padding.unpermute(y),
            None => y,
        };
        let rows = self.permutation.unpermute(rows, payload);
        tensors::reduce_scatter(rows, ReduceOp::Sum, &self.groups.experts, Lane::Overlapped)
    }

    fn finish_combine(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        let [rows, _] = self.lens(payload);
        Ok(truncate_rows(received, rows))
    }

    fn rows_per_expert(&self) -> &[usize] {
        &self.rows_per_expert
    }
}

/// Pads to `len` tokens with tokens that go to no expert.
fn with_remote_experts(experts: Tensor<2, Int>, len: usize) -> Tensor<2, Int> {
    let [tokens, top_k] = experts.dims();
    if tokens == len {
        return experts;
    }
    let dropped = vec![DROPPED; (len - tokens) * top_k];
    let dropped = TensorData::new(dropped, [len - tokens, top_k]);
    let dropped = Tensor::from_data(dropped, (&experts.device(), DType::I32));
    if tokens == 0 {
        dropped
    } else {
        Tensor::cat(vec![experts, dropped], 0)
    }
}
