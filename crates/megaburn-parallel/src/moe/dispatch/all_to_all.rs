use burn::tensor::{Device, Tensor};
use megaburn_collective::{
    CollectiveError, Group, Lane, ReduceOp,
    tensors::{self, Work},
};

use super::{
    expert_sorted::{ExpertSorted, PendingCounts, Prefetched},
    plan::{Exchange, Place},
    row_permutation::RowPermutation,
    rows::{exchange_counts, lengthened, shortened},
    token_dispatcher::{Assignments, Direction, Payload, TokenDispatcher},
};
use crate::moe::ExpertGroups;

/// Sends each row to the rank of its expert (all-to-all over `ep`), and from there to the ranks
/// that share the expert's matrices (all-gather over `etp`).
#[derive(Debug)]
pub(super) struct AllToAllDispatch {
    sent: ExpertSorted,
    exchange: Exchange,
    /// Rows received over `ep`.
    num_received: usize,
    arranged: Option<RowPermutation>,
    ahead: Prefetched,
    groups: ExpertGroups,
}

impl AllToAllDispatch {
    /// Exchanges the number of rows for each expert.
    ///
    /// # Collective
    /// All ranks of `groups.experts`.
    pub(super) fn new(
        slots: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let [_, top_k] = slots.experts.dims();
        let sent = PendingCounts::new(slots.experts, slots.num_experts);
        let (counts, ahead) = exchange_counts(sent.counts(), &groups.experts, || {
            sent.ahead(slots.tokens, top_k)
        })?;
        let counts: Vec<_> = counts
            .chunks(slots.num_experts)
            .map(<[usize]>::to_vec)
            .collect();
        let place = |group: &Group| Place {
            rank: group.rank(),
            ranks: group.size(),
        };
        let [ep, etp] = [&groups.ep, &groups.etp].map(place);
        let mut exchange = Exchange::new(&counts, ep, etp, slots.padded.is_some());
        if let Some(rows) = slots.padded {
            exchange.order = exchange.order.padded(rows);
        }
        let [num_sent, num_received] = exchange.num_rows();
        Ok(Self {
            sent: sent.with_rows(num_sent),
            num_received,
            arranged: RowPermutation::new(&exchange.order, device),
            exchange,
            ahead: Prefetched::new(ahead),
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

    fn start(
        &self,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let Self {
            sent,
            exchange: Exchange { send, recv, .. },
            arranged,
            ahead,
            groups,
            ..
        } = self;
        if to == Direction::Dispatch {
            let rows = match ahead.take(of) {
                Some(ahead) => sent.prefetch_numbers(ahead),
                None => sent.there(x, of),
            };
            return tensors::all_to_all_ranges(rows, send, recv, &groups.ep, Lane::Overlapped);
        }
        let mut rows = match arranged {
            Some(arranged) => arranged.back(x),
            None => x,
        };
        if groups.etp.size() > 1 {
            let shown = tensors::reduce_scatter(rows, ReduceOp::Sum, &groups.etp, Lane::InOrder)?;
            rows = shortened(shown.wait(), self.num_received);
        }
        tensors::all_to_all_ranges(rows, recv, send, &groups.ep, Lane::Overlapped)
    }

    fn finish(
        &self,
        came: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Tensor<2>, CollectiveError> {
        let Self {
            sent,
            exchange: Exchange { shown, .. },
            arranged,
            groups,
            ..
        } = self;
        if to == Direction::Combine {
            return Ok(sent.back(came, of));
        }
        let rows = match groups.etp.size() {
            1 => came,
            _ => tensors::all_gather(lengthened(came, *shown), &groups.etp, Lane::InOrder)?.wait(),
        };
        Ok(match arranged {
            Some(arranged) => arranged.there(rows),
            None => rows,
        })
    }
}
