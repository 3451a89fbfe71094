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
    token_dispatcher::{Assignments, Payload, TokenDispatcher},
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
    by_rank: ExpertSorted,
    /// The received tokens, sorted by this rank's experts.
    by_expert: ExpertSorted,
    rows_per_expert: Vec<usize>,
    /// The permutation that inserts padding, if there is any.
    padding: Option<RowPermutation>,
    /// Tokens sent to each rank, and received from each rank.
    send: Vec<usize>,
    recv: Vec<usize>,
    top_k: usize,
    prefetched: Prefetched,
    groups: ExpertGroups,
}

impl DedupAllToAllDispatch {
    /// Whether deduplication is cheaper: the copies that a token sends, if all experts are equally
    /// likely, are so few that the saved bytes outweigh reordering the rows at the receiver. The
    /// limit is half as many copies as experts per token, or three quarters where rows are
    /// [reordered](plan::arrive_in_order) anyway. (For eight experts on two ranks and two per
    /// token, it was not cheaper.) It is never used with expert tensor parallelism, where several
    /// ranks read each expert's rows.
    pub(super) fn is_cheaper(num_experts: usize, top_k: usize, groups: &ExpertGroups) -> bool {
        let ranks = groups.ep.size();
        let limit = if plan::arrive_in_order(num_experts) {
            0.5
        } else {
            0.75
        };
        ranks > 1
            && groups.etp.size() == 1
            && copies(num_experts, top_k, ranks) <= limit * top_k as f64
    }

    /// Exchanges the number of tokens and rows for each rank, then the experts of the sent tokens.
    ///
    /// # Collective
    /// All ranks of `groups.ep`.
    pub(super) fn new(
        assignments: Assignments,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let ranks = groups.ep.size();
        let own = groups.own(assignments.num_experts);
        let [_, top_k] = assignments.experts.dims();
        let of_experts = PendingCounts::new(assignments.experts.clone(), assignments.num_experts);
        let ep_ranks = ep_ranks_of_experts(assignments.experts.clone(), own.len());
        let by_rank = PendingCounts::new(ep_ranks, ranks);
        let counts = Tensor::cat(vec![by_rank.counts(), of_experts.counts()], 0);
        let prefetch = || by_rank.prefetch(assignments.tokens, top_k.min(ranks));
        let (counts, prefetched) = exchange_counts(counts, &groups.ep, prefetch)?;
        let of_ranks: Vec<(&[usize], &[usize])> = counts
            .chunks(ranks + assignments.num_experts)
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
        let by_rank = by_rank.with_rows(send.iter().sum());
        let ids = by_rank.permute_ids(assignments.experts);
        let ids = tensors::all_to_all(ids, &send, &recv, &groups.ep, Lane::InOrder)?.wait();
        // Ids of remote experts are out of range after this and drop out.
        let ids = if ids.dims()[0] == 0 {
            ids
        } else {
            ids - own.start as i32
        };
        let by_expert = PendingCounts::new(ids, own.len()).with_rows(rows.iter().sum());
        let order = Order::identity(rows);
        let order = match assignments.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            by_rank,
            by_expert,
            padding: RowPermutation::new(&order, device),
            rows_per_expert: order.rows,
            send,
            recv,
            top_k,
            prefetched: Prefetched::new(prefetched),
            groups: groups.clone(),
        })
    }

    /// Reshapes to one row per token.
    fn by_token(&self, x: Tensor<2>, payload: Payload) -> Tensor<2> {
        match payload {
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

    fn start_dispatch(
        &self,
        x: Tensor<2>,
        payload: Payload,
    ) -> Result<Work<Tensor<2>>, CollectiveError> {
        let rows = match self.prefetched.take(payload) {
            Some(prefetched) => self.by_rank.trim_prefetched(prefetched),
            None => {
                let rows = self.by_token(x, payload);
                self.by_rank.permute(rows, Payload::Tokens)
            }
        };
        let [send, recv] = [&self.send, &self.recv];
        tensors::all_to_all(rows, send, recv, &self.groups.ep, Lane::Overlapped)
    }

    fn finish_dispatch(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        let rows = by_assignment(received, payload);
        let rows = self.by_expert.permute(rows, payload);
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
        let rows = self.by_token(self.by_expert.unpermute(rows, payload), payload);
        let [send, recv] = [&self.send, &self.recv];
        tensors::all_to_all(rows, recv, send, &self.groups.ep, Lane::Overlapped)
    }

    fn finish_combine(
        &self,
        received: Tensor<2>,
        payload: Payload,
    ) -> Result<Tensor<2>, CollectiveError> {
        let rows = self.by_rank.unpermute(received, Payload::Tokens);
        Ok(by_assignment(rows, payload))
    }
}

/// Reshapes to one row per token or per assignment; undoes
/// [`by_token`](DedupAllToAllDispatch::by_token).
fn by_assignment(x: Tensor<2>, payload: Payload) -> Tensor<2> {
    match payload {
        Payload::Tokens => x,
        Payload::Assignments => columns(x, 1),
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
