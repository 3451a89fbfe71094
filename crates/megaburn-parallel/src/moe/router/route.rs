use burn::tensor::{DType, Tensor, TensorData};
use megaburn_collective::region::FAILED_REGION;
use megaburn_kernels::{Pass, choose_experts, expert_weights, router_scores, with_gradient};

use super::{How, Router, off_graph, read};
use crate::{
    TokenContext,
    moe::{
        balance::{Choice, Tokens},
        capacity::Slots,
        dispatch::DROPPED,
        sinkhorn::sinkhorn_biases,
    },
};

/// Where tokens go.
pub(in crate::moe) struct Routed {
    /// `top_k` experts a token, one token's behind the other's.
    pub(in crate::moe) experts: Vec<u32>,
    /// Their weights, `[tokens, top_k]` in f32.
    pub(in crate::moe) weights: Tensor<2>,
    /// Rows that every expert is given; none: those that come.
    pub(in crate::moe) padded: Option<usize>,
}

impl Router {
    /// The experts of each token and their weights.
    ///
    /// # Shapes
    /// `x`: `[seq, batch, d_model]`
    pub(in crate::moe) fn route(&self, x: Tensor<3>, context: &TokenContext) -> Routed {
        let How { options, groups, balance, .. } = &self.how;
        let [seq, batch, _] = x.dims();
        let counted = self.counted(context, seq * batch);
        let mut logits = self.logits(x);
        let tokens = Tokens {
            seq,
            batch,
            group: &groups.tp_cp,
            counted: counted.map(|counted| as_column(counted, &off_graph(&logits))),
        };
        let plain = off_graph(&logits);
        let plain_scores = router_scores(plain.clone(), options.scores);
        let mut experts = self.choose([&plain, &plain_scores], counted, context);
        let counts = context.loss_factor.map(|_| self.counts(&experts, batch, counted));
        let (mut of_scores, mut sums) = (None, None);
        if let (Some(factor), Some(counts)) = (context.loss_factor, &counts)
            && balance.is_some()
        {
            let scores = (plain_scores, options.scores);
            let found = balance.gradients(plain, scores, counts, &tokens, self.load(), factor);
            (of_scores, sums) = (found.of_scores, Some(found.sums));
            if let Some(gradient) = found.of_logits {
                logits = with_gradient(logits, gradient);
            }
        }
        let mut scores = router_scores(logits, options.scores);
        if let Some(gradient) = of_scores {
            scores = with_gradient(scores, gradient);
        }
        let weights = expert_weights(scores, &experts, options);
        if let Some(counted) = counted {
            let slots = experts.chunks_mut(options.top_k).zip(counted);
            slots.filter(|(_, counted)| !**counted).for_each(|(slots, _)| slots.fill(DROPPED));
        }
        let (dropped, padded) = self.drop_from(&mut experts, &weights, [seq, batch], context);
        // What is computed once more was counted.
        if let Some(counts) = counts.filter(|_| !Pass::is_backward()) {
            let all = self.how.num_experts;
            let of_all = |expert| counts.iter().skip(expert).step_by(all).sum();
            self.load().add(&(0..all).map(of_all).collect::<Vec<u64>>(), dropped, sums);
        }
        Routed { experts, weights, padded }
    }

    /// Drops what is too much for some experts: how many slots, and rows that every expert is given.
    fn drop_from(
        &self,
        experts: &mut [u32],
        weights: &Tensor<2>,
        [seq, batch]: [usize; 2],
        context: &TokenContext,
    ) -> (u64, Option<usize>) {
        let How { num_experts, options, groups, capacity, .. } = &self.how;
        let Some(capacity) = capacity else { return (0, None) };
        let documents = context.documents.as_ref();
        let (top_k, num_experts) = (options.top_k, *num_experts);
        let slots = Slots { seq, batch, top_k, num_experts, groups, documents };
        let weights = off_graph(weights);
        let device = weights.device();
        let dropped = capacity.drop_from(experts, &read(weights.flatten(0, 1)), &slots, &device);
        let dropped = dropped.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"));
        (dropped, capacity.pad.then(|| capacity.rows(&slots)))
    }

    /// The experts of all slots.
    fn choose(
        &self,
        [logits, scores]: [&Tensor<2>; 2],
        counted: Option<&[bool]>,
        context: &TokenContext,
    ) -> Vec<u32> {
        let How { num_experts, options, groups, balance, .. } = &self.how;
        let is_trained = context.loss_factor.is_some();
        match balance.choice {
            Choice::InTurn => {
                let slots = scores.dims()[0] * options.top_k;
                (0..slots).map(|slot| (slot % num_experts) as u32).collect()
            }
            Choice::Sinkhorn if is_trained => {
                let logits = read(logits.clone().flatten(0, 1));
                let biases = sinkhorn_biases(&logits, *num_experts, counted, &groups.tp_cp);
                let biases = biases.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"));
                choose_experts(&logits, *num_experts, Some(&biases), options)
            }
            Choice::Scores | Choice::Sinkhorn => {
                let (biases, scores) = (self.biases(), read(scores.clone().flatten(0, 1)));
                if let Some(biases) = biases.as_ref().filter(|_| {
                    // What is computed once more was counted.
                    balance.margins && is_trained && !Pass::is_backward()
                }) {
                    let rows = scores.chunks_exact(*num_experts).enumerate();
                    let is_counted = |token: usize| counted.is_none_or(|all| all[token]);
                    let rows = rows.filter(|(token, _)| is_counted(*token)).map(|(_, row)| row);
                    self.load().add_margins(rows, biases, options.top_k);
                }
                choose_experts(&scores, *num_experts, biases.as_deref(), options)
            }
        }
    }

    /// Which of this rank's tokens count, of those that the ranks of its tensor-parallel group share; none: all.
    fn counted<'a>(&self, context: &'a TokenContext, tokens: usize) -> Option<&'a [bool]> {
        let all = context.counted.as_deref()?;
        let start = if all.len() == tokens { 0 } else { self.how.groups.tp.rank() * tokens };
        Some(&all[start..start + tokens])
    }

    /// Tokens that go from each sequence to each expert.
    fn counts(&self, experts: &[u32], batch: usize, counted: Option<&[bool]>) -> Vec<u64> {
        let How { num_experts, options, .. } = &self.how;
        let mut counts = vec![0; batch * num_experts];
        let tokens = experts.chunks(options.top_k).enumerate();
        for (token, chosen) in tokens.filter(|(token, _)| counted.is_none_or(|all| all[*token])) {
            let row = token % batch * num_experts;
            chosen.iter().for_each(|&expert| counts[row + expert as usize] += 1);
        }
        counts
    }
}

fn as_column(counted: &[bool], like: &Tensor<2>) -> Tensor<2> {
    let values: Vec<f32> = counted.iter().map(|&is_counted| f32::from(is_counted)).collect();
    Tensor::from_data(TensorData::new(values, [counted.len(), 1]), (&like.device(), DType::F32))
}
