//! Losses that make tokens go to all experts alike.
//!
//! Each is a sum over tokens, as the loss itself, so that the trainer's one division by the tokens of the global
//! batch makes means of all of them, whatever the layout. Of `T` tokens that a loss is about, `C_e` of which went
//! to expert `e` of `E`, each to `k`, and `p_te` their probabilities: `E / (k T^2) sum_e C_e sum_t p_te`, times
//! `T`. `C_e` has no gradient, so that of `p_te` is `E C_e / (k T)`, and is put straight onto the scores.

use burn::tensor::{DType, Tensor, TensorData};
use megaburn_collective::{Group, ReduceOp, region::FAILED_REGION, tensors};
use megaburn_kernels::{
    BalanceLoss, RouterGradients, RouterLosses, RouterScores, router_losses, sum_columns,
};

use super::ExpertLoad;

/// What makes tokens go to all experts alike, each with what its loss is multiplied with; 0: it does not.
///
/// Source: Fedus et al. (2021), <https://arxiv.org/abs/2101.03961>, section 2.2; Zoph et al. (2022),
/// <https://arxiv.org/abs/2202.08906>, for the z-loss; Megatron-LM `megatron/core/transformer/moe/router.py`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadBalance {
    /// The balancing loss of each micro-batch, over the ranks that share its sequences.
    pub aux_loss: f64,
    /// That of each sequence by itself, which depends on no layout and no batch.
    pub seq_aux_loss: f64,
    /// That of the global batch: `C_e` are those of the batch before, so that no rank waits for another in
    /// the middle of a pass, and no order of micro-batches matters. The first batch of a run has none.
    pub global_aux_loss: f64,
    /// The mean square of the logits' log-sum-exp, which keeps them small.
    pub z_loss: f64,
    /// By what experts are chosen.
    pub choice: BalanceChoice,
    /// Whether margins are counted, for [biases](super::quantile_biases) by which all experts are chosen alike.
    pub quantile_counts: bool,
}

/// By what experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BalanceChoice {
    /// Their scores, and their biases where they have some.
    #[default]
    Scores,
    /// In training, the scores that Sinkhorn's algorithm makes of the logits of a micro-batch, by which all are
    /// chosen alike; weights are those of the scores.
    Sinkhorn,
    /// Their turn, whatever their scores: for benchmarks. As the most even scores would have it, the experts of a
    /// token are of several ranks: one and the next in turn are three eighths of all experts apart.
    RoundRobin,
}

/// The experts of so many slots in turn, all equally often.
pub(super) fn round_robin(slots: usize, num_experts: usize) -> Vec<i32> {
    // No divisor in common, or some would have no turn.
    let reaches_all = |apart: usize| {
        !(2..=apart).any(|d| apart.is_multiple_of(d) && num_experts.is_multiple_of(d))
    };
    let mut apart = (3 * num_experts).div_ceil(8)..;
    let apart = apart
        .find(|&apart| reaches_all(apart))
        .expect("one more than all reaches them");
    (0..slots)
        .map(|slot| (slot * apart % num_experts) as i32)
        .collect()
}

impl LoadBalance {
    fn has_aux(&self) -> bool {
        [self.aux_loss, self.seq_aux_loss, self.global_aux_loss]
            .iter()
            .any(|&loss| loss != 0.0)
    }
}

/// The tokens of this rank in a micro-batch, `[seq, batch]`, which `group` shares.
pub(super) struct Tokens<'a> {
    pub(super) seq: usize,
    pub(super) batch: usize,
    pub(super) group: &'a Group,
    /// 1 for those that count, else 0, `[seq * batch, 1]`; none: all do.
    pub(super) counted: Option<Tensor<2>>,
}

/// What the losses add to the router's gradients, and their values.
pub(super) struct Balanced {
    pub(super) gradients: RouterGradients,
    /// Sums over this rank's tokens, of [`super::load::NUM_LOSSES`] losses, then of the probabilities.
    pub(super) sums: Tensor<1>,
}

impl LoadBalance {
    /// Of these logits and scores, off the autodiff device; `counts` has the tokens that went from each sequence to
    /// each expert.
    ///
    /// # Shapes
    /// `logits`, `scores`: `[seq * batch, e]`; `counts`: `[batch, e]` in f32
    /// # Collective
    /// The ranks that share the micro-batch, where there are losses of sequences or micro-batches.
    pub(super) fn gradients(
        &self,
        logits: Tensor<2>,
        (scores, kind): (Tensor<2>, RouterScores),
        counts: Tensor<2>,
        tokens: &Tokens<'_>,
        load: &ExpertLoad,
        factor: f64,
    ) -> Balanced {
        let [micro_batch, sequences] = self.of_counts(counts, tokens, factor);
        let global_batch = self.of_last_batch(load, &scores, factor);
        let z_loss = (self.z_loss != 0.0).then_some(self.z_loss * factor);
        let losses = RouterLosses {
            scores: kind,
            micro_batch,
            sequences,
            global_batch,
            z_loss,
        };
        let terms = router_losses(logits, scores, tokens.counted.clone(), &losses);
        Balanced {
            gradients: terms.gradients,
            sums: terms.sums,
        }
    }

    /// The losses of the micro-batch and of its sequences.
    fn of_counts(
        &self,
        counts: Tensor<2>,
        tokens: &Tokens<'_>,
        factor: f64,
    ) -> [Option<BalanceLoss>; 2] {
        if self.aux_loss == 0.0 && self.seq_aux_loss == 0.0 {
            return [None, None];
        }
        let counts = tensors::all_reduce(counts, ReduceOp::Sum, tokens.group)
            .unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"));
        let micro_batch = (self.aux_loss != 0.0).then(|| BalanceLoss {
            counts: sum_columns(counts.clone()),
            factor: self.aux_loss * factor,
        });
        let sequences = (self.seq_aux_loss != 0.0).then(|| BalanceLoss {
            counts,
            factor: self.seq_aux_loss * factor,
        });
        [micro_batch, sequences]
    }

    fn of_last_batch(
        &self,
        load: &ExpertLoad,
        like: &Tensor<2>,
        factor: f64,
    ) -> Option<BalanceLoss> {
        // Parts of all that was sent, `C_e / (k T)`.
        let last = load.last().filter(|_| self.global_aux_loss != 0.0)?;
        let last: Vec<f32> = last.iter().map(|&part| part as f32).collect();
        let parts = TensorData::new(last, [1, like.dims()[1]]);
        let counts = Tensor::from_data(parts, (&like.device(), DType::F32));
        Some(BalanceLoss {
            counts,
            factor: self.global_aux_loss * factor,
        })
    }

    /// Whether there is any loss.
    pub(super) fn is_some(&self) -> bool {
        self.has_aux() || self.z_loss != 0.0
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(32, 8)]
    #[case(8, 2)]
    #[case(6, 5)]
    #[case(3, 3)]
    #[case(1, 1)]
    fn all_have_as_many_turns_and_a_token_has_none_twice(
        #[case] num_experts: usize,
        #[case] top_k: usize,
    ) {
        let all = round_robin(num_experts * top_k, num_experts);
        let turns = |expert| all.iter().filter(|found| **found == expert).count();
        assert!(
            (0..num_experts as i32).all(|expert| turns(expert) == top_k),
            "{all:?}"
        );
        for of_token in all.chunks(top_k) {
            let mut sorted = of_token.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), top_k, "{of_token:?}");
        }
    }

    /// Whoever has half of the experts has half of those of most tokens.
    #[test]
    fn experts_of_a_token_are_of_several_ranks() {
        let all = round_robin(32 * 8, 32);
        let own = |of_token: &[i32]| of_token.iter().filter(|expert| **expert < 16).count();
        assert!(
            all.chunks(8)
                .all(|of_token| (3..=5).contains(&own(of_token))),
            "{all:?}"
        );
    }
}
