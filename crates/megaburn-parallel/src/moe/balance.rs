//! Losses that balance the load of the experts.
//!
//! Each loss is a sum over tokens, like the language-model loss, so that the trainer's single
//! division by the tokens of the global batch turns all of them into means, whatever the layout.
//! For a loss over `T` tokens with probabilities `p_te`, each routed to `k` of `E` experts, where
//! expert `e` receives `C_e` tokens, the loss is `E / (k T^2) sum_e C_e sum_t p_te`, times `T`.
//! `C_e` has no gradient, so the gradient of `p_te` is `E C_e / (k T)`, which is added directly to
//! the gradient of the scores.

use burn::tensor::{DType, Tensor, TensorData};
use megaburn_collective::{Group, Lane, ReduceOp, region::unwrap_collective, tensors};
use megaburn_kernels::{
    BalanceLoss, RouterGradients, RouterLosses, RouterScores, router_losses, sum_columns,
};

use super::ExpertLoad;

/// Load balancing of experts, with the coefficient of each loss; 0 turns a loss off.
///
/// Source: Fedus et al. (2021), <https://arxiv.org/abs/2101.03961>, section 2.2; Zoph et al.
/// (2022), <https://arxiv.org/abs/2202.08906>, for the z-loss; Megatron-LM
/// `megatron/core/transformer/moe/router.py`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadBalance {
    /// Coefficient of the load-balancing loss over each micro-batch, on all ranks that share its
    /// sequences.
    pub aux_loss: f64,
    /// Coefficient of the load-balancing loss over each sequence, which depends on neither layout
    /// nor batch.
    pub seq_aux_loss: f64,
    /// Coefficient of the load-balancing loss over the global batch. `C_e` is taken from the
    /// previous batch, so that no rank waits for another in the middle of a pass and the order of
    /// micro-batches does not matter. The first batch of a run has no such loss.
    pub global_aux_loss: f64,
    /// Coefficient of the z-loss, the mean square of the logits' log-sum-exp, which keeps the
    /// logits small.
    pub z_loss: f64,
    /// How experts are chosen.
    pub choice: BalanceChoice,
    /// Whether margins are counted for [biases](super::quantile_biases) that balance the experts.
    pub quantile_counts: bool,
}

/// How the experts of a token are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BalanceChoice {
    /// By their scores, plus their biases if the router has any.
    #[default]
    Scores,
    /// In training, by the scores that Sinkhorn's algorithm derives from the logits of a
    /// micro-batch, which choose all experts equally often. The weights are still computed from the
    /// original scores.
    Sinkhorn,
    /// In turn, whatever the scores; for benchmarks. As under perfectly balanced scores, the
    /// experts of a token are on several ranks: consecutive choices are three eighths of all
    /// experts apart.
    RoundRobin,
}

/// Chooses the experts of `slots` slots round robin, all equally often.
pub(super) fn round_robin(slots: usize, num_experts: usize) -> Vec<i32> {
    // The stride must be coprime to the number of experts, or some would never be chosen.
    let reaches_all = |apart: usize| {
        !(2..=apart).any(|d| apart.is_multiple_of(d) && num_experts.is_multiple_of(d))
    };
    let mut apart = (3 * num_experts).div_ceil(8)..;
    let apart = apart
        .find(|&apart| reaches_all(apart))
        .expect("num_experts + 1 has no common divisor with num_experts");
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

/// This rank's tokens of a micro-batch, `[seq, batch]`; the micro-batch is shared by the ranks of
/// `group`.
pub(super) struct Tokens<'a> {
    pub(super) seq: usize,
    pub(super) batch: usize,
    pub(super) group: &'a Group,
    /// 1 for tokens that count, else 0, `[seq * batch, 1]`; `None` means all count.
    pub(super) counted: Option<Tensor<2>>,
}

/// The values of the losses, and what they add to the router's gradients.
pub(super) struct Balanced {
    pub(super) gradients: RouterGradients,
    /// Sums over this rank's tokens: [`super::load::NUM_LOSSES`] losses, then the probabilities.
    pub(super) sums: Tensor<1>,
}

impl LoadBalance {
    /// Computes the losses from logits and scores off the autodiff device; `counts` has the number
    /// of tokens that each sequence sends to each expert.
    ///
    /// # Shapes
    /// `logits`, `scores`: `[seq * batch, e]`; `counts`: `[batch, e]` in f32
    /// # Collective
    /// The ranks that share the micro-batch, if there is a loss over micro-batches or sequences.
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

    /// The losses over the micro-batch and over its sequences.
    fn of_counts(
        &self,
        counts: Tensor<2>,
        tokens: &Tokens<'_>,
        factor: f64,
    ) -> [Option<BalanceLoss>; 2] {
        if self.aux_loss == 0.0 && self.seq_aux_loss == 0.0 {
            return [None, None];
        }
        let counts = tensors::all_reduce(counts, ReduceOp::Sum, tokens.group, Lane::InOrder);
        let counts = unwrap_collective(counts).wait();
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
        // Shares of all assignments, `C_e / (k T)`.
        let last = load.last().filter(|_| self.global_aux_loss != 0.0)?;
        let last: Vec<f32> = last.iter().map(|&part| part as f32).collect();
        let parts = TensorData::new(last, [1, like.dims()[1]]);
        let counts = Tensor::from_data(parts, (&like.device(), DType::F32));
        Some(BalanceLoss {
            counts,
            factor: self.global_aux_loss * factor,
        })
    }

    /// Whether any loss is on.
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

    /// A rank with half of the experts has about half of the experts of every token.
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
