use burn::tensor::{Device, Tensor};
use megaburn_collective::{
    CollectiveError, Group, Lane, ReduceOp,
    tensors::{self, Work},
};

use super::{
    expert_sorted::{ExpertSorted, PendingCounts, Prefetched},
    plan::{Exchange, Place},
    row_permutation::RowPermutation,
    rows::{exchange_counts, pad_rows, truncate_rows},
    token_dispatcher::{Assignments, Payload, TokenDispatcher},
};
use crate::moe::ExpertGroups;

/// Sends each row to the rank of its expert (all-to-all over `ep`), and from there to the ranks
/// that share the expert's matrices (all-gather over `etp`).
///
/// ```text
/// Dispatch: 1. permute token rows by expert   2. all-to-all (ep)   3. all-gather (etp)
///           4. reorder (e0,r0)(e1,r0)..(e0,r1).. to (e0,r0)(e0,r1)..(e1,r0).., unless received so
/// Combine:  4. undo the reorder   3. reduce-scatter (etp)   2. all-to-all back
///           1. sum each token's rows
/// ```
///
/// There, `(e0,r1)` are the rows of expert 0 from sending rank 1. Step 4 also inserts padding.
#[derive(Debug)]
pub(super) struct AllToAllDispatch {
    permutation: ExpertSorted,
    exchange: Exchange,
    /// Rows received over `ep`.
    num_received: usize,
    /// The reordering of received rows (step 4), unless they are received in the experts' order.
    to_expert_major: Option<RowPermutation>,
    prefetched: Prefetched,
    groups: ExpertGroups,
}

impl AllToAllDispatch {
    /// Exchanges the number of rows for each expert.
    ///
    /// # Collective
    /// All ranks of `groups.experts`.
    pub(super) fn new(
        assignments: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let [_, top_k] = assignments.experts.dims();
        let permutation = PendingCounts::new(assignments.experts, assignments.num_experts);
        let prefetch = || permutation.prefetch(assignments.tokens, top_k);
        let (counts, prefetched) =
            exchange_counts(permutation.counts(), &groups.experts, prefetch)?;
        let counts: Vec<_> = counts
            .chunks(assignments.num_experts)
            .map(<[usize]>::to_vec)
            .collect();
        let place = |group: &Group| Place {
            rank: group.rank(),
            ranks: group.size(),
        };
        let [ep, etp] = [&groups.ep, &groups.etp].map(place);
        let mut exchange = Exchange::new(&counts, ep, etp, assignments.padded.is_some());
        if let Some(rows) = assignments.padded {
            exchange.order = exchange.order.padded(rows);
        }
        let [num_sent, num_received] = exchange.num_rows();
        Ok(Self {
            permutation: permutation.with_rows(num_sent),
            num_received,
            to_expert_major: RowPermutation::new(&exchange.order, device),
            exchange,
            prefetched: Prefetched::new(prefetched),
            groups: groups.clone(),
        })
    }
}

impl TokenDispatcher for AllToAllDispatch {
    fn rows_per_expert(&self) -> &[usize] {
        &self.exchange.order.rows
    }

    fn sends(&self) -> bool {
        self.groups.ep.size() > 1
    }

    fn start_dispatch(
        &self,
        x: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let rows = match self.prefetched.take(payload) {
            Some(prefetched) => self.permutation.trim_prefetched(prefetched),
            None => self.permutation.permute(x, payload),
        };
        let Exchange { send, recv, .. } = &self.exchange;
        tensors::all_to_all_ranges(rows, send, recv, &self.groups.ep, Lane::Overlapped)
    }

    fn finish_dispatch(
        &self,
        received: Tensor<2>,
        _: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        let etp = &self.groups.etp;
        let rows = match etp.size() {
            1 => received,
            _ => {
                let padded = pad_rows(received, self.exchange.padded_rows);
                tensors::all_gather(padded, etp, Lane::InOrder)?.wait()
            }
        };
        Ok(match &self.to_expert_major {
            Some(to_expert_major) => to_expert_major.permute(rows),
            None => rows,
        })
    }

    fn start_combine(&self, y: Tensor<2>, _: Payload) -> Result<Work<Tensor<2>>, CollectiveError> {
        let mut rows = match &self.to_expert_major {
            Some(to_expert_major) => to_expert_major.unpermute(y),
            None => y,
        };
        let etp = &self.groups.etp;
        if etp.size() > 1 {
            let padded = tensors::reduce_scatter(rows, ReduceOp::Sum, etp, Lane::InOrder)?;
            rows = truncate_rows(padded.wait(), self.num_received);
        }
        let Exchange { send, recv, .. } = &self.exchange;
        tensors::all_to_all_ranges(rows, recv, send, &self.groups.ep, Lane::Overlapped)
    }

    fn finish_combine(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        Ok(self.permutation.unpermute(received, payload))
    }
}
