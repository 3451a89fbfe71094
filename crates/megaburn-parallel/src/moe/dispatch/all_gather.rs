use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{
    CollectiveError, Group, Lane, ReduceOp,
    tensors::{self, Work},
};

use super::{
    expert_sorted::{ExpertSorted, PendingCounts},
    plan::Order,
    row_permutation::RowPermutation,
    rows::{exchange_counts, index, lengthened, shortened},
    token_dispatcher::{Assignments, DROPPED, Direction, Payload, TokenDispatcher},
};
use crate::moe::ExpertGroups;

/// All-gathers all tokens. Each rank selects the tokens of its experts, and the sums of their
/// outputs are reduce-scattered.
#[derive(Debug)]
pub(super) struct AllGatherDispatch {
    taken: ExpertSorted,
    rows_per_expert: Vec<usize>,
    /// The permutation that inserts padding, if there is any.
    arranged: Option<RowPermutation>,
    top_k: usize,
    /// Number of tokens on this rank, and the largest number on any rank, to which all ranks pad
    /// for the all-gather.
    tokens: usize,
    shown: usize,
    groups: ExpertGroups,
}

impl AllGatherDispatch {
    /// Gathers the experts of all tokens.
    ///
    /// # Collective
    /// All ranks of `groups.experts`.
    pub(super) fn new(
        slots: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let [tokens, top_k] = slots.experts.dims();
        let shown = match groups.experts.size() {
            1 => tokens,
            _ => {
                let (all, ()) = exchange_counts(index([tokens], device), &groups.experts, || ())?;
                all.into_iter()
                    .max()
                    .expect("the group has at least one rank")
            }
        };
        let own = groups.own(slots.num_experts);
        let all = with_remote_experts(slots.experts, shown);
        let all = tensors::all_gather(all, &groups.experts, Lane::InOrder)?.wait();
        // Ids of remote experts are out of range after this and drop out.
        let all = if shown == 0 {
            all
        } else {
            all - own.start as i32
        };
        let taken = PendingCounts::new(all, own.len());
        let (counts, ()) = exchange_counts(taken.counts(), &Group::single(0), || ())?;
        let order = Order::identity(counts.clone());
        let order = match slots.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            taken: taken.with_rows(counts.iter().sum()),
            arranged: RowPermutation::new(&order, device),
            rows_per_expert: order.rows,
            top_k,
            tokens,
            shown,
            groups: groups.clone(),
        })
    }

    /// Rows of this payload on this rank, and after padding for the all-gather.
    fn lens(&self, of: Payload) -> [usize; 2] {
        let of_token = match of {
            Payload::Tokens => 1,
            Payload::Assignments => self.top_k,
        };
        [self.tokens * of_token, self.shown * of_token]
    }
}

impl TokenDispatcher for AllGatherDispatch {
    fn sends(&self) -> bool {
        self.groups.experts.size() > 1
    }

    fn start(
        &self,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let group = &self.groups.experts;
        if to == Direction::Dispatch {
            let [_, shown] = self.lens(of);
            return tensors::all_gather(lengthened(x, shown), group, Lane::Overlapped);
        }
        let rows = match &self.arranged {
            Some(arranged) => arranged.back(x),
            None => x,
        };
        let rows = self.taken.back(rows, of);
        tensors::reduce_scatter(rows, ReduceOp::Sum, group, Lane::Overlapped)
    }

    fn finish(
        &self,
        came: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Tensor<2>, CollectiveError> {
        if to == Direction::Combine {
            let [own, _] = self.lens(of);
            return Ok(shortened(came, own));
        }
        let rows = self.taken.there(came, of);
        Ok(match &self.arranged {
            Some(arranged) => arranged.there(rows),
            None => rows,
        })
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
    let nobodys = vec![DROPPED; (len - tokens) * top_k];
    let nobodys = TensorData::new(nobodys, [len - tokens, top_k]);
    let nobodys = Tensor::from_data(nobodys, (&experts.device(), DType::I32));
    if tokens == 0 {
        nobodys
    } else {
        Tensor::cat(vec![experts, nobodys], 0)
    }
}
