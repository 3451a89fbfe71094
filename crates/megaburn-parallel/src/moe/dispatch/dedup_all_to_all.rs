use burn::tensor::{Device, Tensor};
use megaburn_collective::{
    CollectiveError, Lane,
    tensors::{self, Work},
};
use megaburn_kernels::ep_ranks_of_experts;

use super::{
    expert_sorted::{ExpertSorted, PendingCounts, Prefetched},
    plan::{self, Order},
    row_permutation::RowPermutation,
    rows::{columns, exchange_counts},
    token_dispatcher::{Assignments, Direction, Payload, TokenDispatcher},
};
use crate::moe::ExpertGroups;

/// Sends each token once to every rank that has some of its experts (all-to-all over `ep`). That
/// rank copies the token to those experts and returns one sum of their outputs, rounded to the
/// dtype of each output.
///
/// Source: DeepSeek-AI, DeepEP (<https://github.com/deepseek-ai/DeepEP>); Megatron-LM
/// `--moe-token-dispatcher-type flex`.
#[derive(Debug)]
pub(super) struct DedupAllToAllDispatch {
    /// This rank's tokens, sorted by destination rank.
    sent: ExpertSorted,
    /// The received tokens, sorted by this rank's experts.
    taken: ExpertSorted,
    rows_per_expert: Vec<usize>,
    /// The permutation that inserts padding, if there is any.
    arranged: Option<RowPermutation>,
    /// Tokens sent to each rank, and received from each rank.
    send: Vec<usize>,
    recv: Vec<usize>,
    top_k: usize,
    ahead: Prefetched,
    groups: ExpertGroups,
}

impl DedupAllToAllDispatch {
    /// Whether deduplication pays off: the copies that a token sends, if all experts are equally
    /// likely, are so few that the saved bytes outweigh reordering the rows at the receiver. The
    /// limit is half as many copies as experts per token, or three quarters where rows are
    /// [reordered](plan::are_placed) anyway. (For eight experts on two ranks and two per token, it
    /// did not pay off.) It is never used with expert tensor parallelism, where several ranks read
    /// each expert's rows.
    pub(super) fn pays(num_experts: usize, top_k: usize, groups: &ExpertGroups) -> bool {
        let ranks = groups.ep.size();
        let slots = top_k as f64;
        let most = if plan::are_placed(num_experts) {
            0.5
        } else {
            0.75
        };
        ranks > 1 && groups.etp.size() == 1 && copies(num_experts, top_k, ranks) <= most * slots
    }

    /// Exchanges the number of tokens and rows for each rank, then the experts of the sent tokens.
    ///
    /// # Collective
    /// All ranks of `groups.ep`.
    pub(super) fn new(
        slots: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let ranks = groups.ep.size();
        let own = groups.own(slots.num_experts);
        let [_, top_k] = slots.experts.dims();
        let of_experts = PendingCounts::new(slots.experts.clone(), slots.num_experts);
        let sent = PendingCounts::new(ep_ranks_of_experts(slots.experts.clone(), own.len()), ranks);
        let counts = Tensor::cat(vec![sent.counts(), of_experts.counts()], 0);
        let ahead = || sent.ahead(slots.tokens, top_k.min(ranks));
        let (counts, ahead) = exchange_counts(counts, &groups.ep, ahead)?;
        let of_ranks: Vec<(&[usize], &[usize])> = counts
            .chunks(ranks + slots.num_experts)
            .map(|of_rank| of_rank.split_at(ranks))
            .collect();
        let send = of_ranks[groups.ep.rank()].0.to_vec();
        let recv: Vec<usize> = of_ranks
            .iter()
            .map(|(tokens, _)| tokens[groups.ep.rank()])
            .collect();
        let rows = own
            .clone()
            .map(|expert| of_ranks.iter().map(|(_, rows)| rows[expert]).sum());
        let rows: Vec<usize> = rows.collect();
        let sent = sent.with_rows(send.iter().sum());
        let came = sent.numbers(slots.experts);
        let came = tensors::all_to_all(came, &send, &recv, &groups.ep, Lane::InOrder)?.wait();
        // Ids of remote experts are out of range after this and drop out.
        let came = if came.dims()[0] == 0 {
            came
        } else {
            came - own.start as i32
        };
        let taken = PendingCounts::new(came, own.len()).with_rows(rows.iter().sum());
        let order = Order::identity(rows);
        let order = match slots.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            sent,
            taken,
            arranged: RowPermutation::new(&order, device),
            rows_per_expert: order.rows,
            send,
            recv,
            top_k,
            ahead: Prefetched::new(ahead),
            groups: groups.clone(),
        })
    }

    /// Reshapes to one row per token.
    fn by_token(&self, x: Tensor<2>, of: Payload) -> Tensor<2> {
        match of {
            Payload::Tokens => x,
            Payload::Assignments => columns(x, self.top_k),
        }
    }
}

/// The expected number of ranks on which a token has experts, if all experts are equally likely.
fn copies(num_experts: usize, top_k: usize, ranks: usize) -> f64 {
    let elsewhere = num_experts - num_experts / ranks;
    let none_here = (0..top_k)
        .map(|slot| elsewhere.saturating_sub(slot) as f64 / (num_experts - slot) as f64)
        .product::<f64>();
    ranks as f64 * (1.0 - none_here)
}

impl TokenDispatcher for DedupAllToAllDispatch {
    fn rows_per_expert(&self) -> &[usize] {
        &self.rows_per_expert
    }

    fn sends(&self) -> bool {
        true
    }

    fn start(
        &self,
        x: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let Self {
            sent,
            taken,
            arranged,
            send,
            recv,
            ahead,
            groups,
            ..
        } = self;
        if to == Direction::Dispatch {
            let rows = match ahead.take(of) {
                Some(ahead) => sent.prefetch_numbers(ahead),
                None => sent.there(self.by_token(x, of), Payload::Tokens),
            };
            return tensors::all_to_all(rows, send, recv, &groups.ep, Lane::Overlapped);
        }
        let rows = match arranged {
            Some(arranged) => arranged.back(x),
            None => x,
        };
        let rows = self.by_token(taken.back(rows, of), of);
        tensors::all_to_all(rows, recv, send, &groups.ep, Lane::Overlapped)
    }

    fn finish(
        &self,
        came: Tensor<2>,
        of: Payload,
        to: Direction,
    ) -> Result<Tensor<2>, CollectiveError> {
        let by_slot = |x: Tensor<2>| match of {
            Payload::Tokens => x,
            Payload::Assignments => columns(x, 1),
        };
        if to == Direction::Combine {
            return Ok(by_slot(self.sent.back(came, Payload::Tokens)));
        }
        let rows = self.taken.there(by_slot(came), of);
        Ok(match &self.arranged {
            Some(arranged) => arranged.there(rows),
            None => rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(8, 2, 2, 11.0 / 7.0)]
    #[case(8, 5, 2, 2.0)]
    #[case(8, 8, 4, 4.0)]
    #[case(8, 6, 8, 6.0)]
    #[case(6, 1, 3, 1.0)]
    fn copies_are_counted(
        #[case] num_experts: usize,
        #[case] top_k: usize,
        #[case] ranks: usize,
        #[case] expected: f64,
    ) {
        assert!((copies(num_experts, top_k, ranks) - expected).abs() < 1e-12);
    }
}
