//! Router losses: load-balancing losses and the z-loss, with their values and their contributions
//! to the router's gradients.
//!
//! Each loss is a sum over tokens, like the language-model loss, so that one division by the token
//! count of the global batch turns all of them into means. A load-balancing loss over `E` experts
//! with counts `C_e`, whose sum is `N`, is `E / N sum_e C_e sum_t p_te`; the counts have no
//! gradient. The z-loss is the sum of the squared log-sum-exps of the logits.
//!
//! Source: Fedus et al. (2021), <https://arxiv.org/abs/2101.03961>, section 2.2; Zoph et al.
//! (2022), <https://arxiv.org/abs/2202.08906>; Megatron-LM
//! `megatron/core/transformer/moe/moe_utils.py`, `switch_load_balancing_loss_func` and
//! `z_loss_func`.

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

use super::router::{RouterGradients, RouterScores};

/// A load-balancing loss.
#[derive(Clone, Debug)]
pub struct BalanceLoss {
    /// The number of tokens assigned to each expert, `[1, e]`, or per sequence, `[b, e]`; in f32,
    /// off the autodiff device.
    pub counts: Tensor<2>,
    /// The factor of its gradient.
    pub factor: f64,
}

/// The losses of a router.
#[derive(Clone, Debug)]
pub struct RouterLosses {
    /// How the scores were computed from the logits. A token's probabilities are its scores;
    /// sigmoid scores are first divided by their sum.
    pub scores: RouterScores,
    /// The loss over the tokens of a micro-batch.
    pub micro_batch: Option<BalanceLoss>,
    /// The loss of each sequence separately.
    pub sequences: Option<BalanceLoss>,
    /// The loss over a global batch. Its counts belong to another batch than the scores, so its
    /// value is not computed.
    pub global_batch: Option<BalanceLoss>,
    /// The factor of the z-loss's gradient; `None` disables the z-loss.
    pub z_loss: Option<f64>,
}

/// What the losses add to the router's gradients, and the values of the losses.
#[derive(Clone, Debug)]
pub struct RouterLossTerms {
    /// Gradients of the scores if there is a load-balancing loss, and of the logits if there is a
    /// z-loss, `[s * b, e]`.
    pub gradients: RouterGradients,
    /// Sums over the tokens that count, `[3 + e]` in f32: the micro-batch loss, the sequence loss
    /// and the z-loss, without their factors (0 for a loss that is disabled), then the
    /// probabilities of each expert.
    pub sums: Tensor<1>,
}

/// The number of losses that have values.
const NUM_VALUES: usize = 3;

impl RouterLosses {
    fn has_balance(&self) -> bool {
        [&self.micro_batch, &self.sequences, &self.global_batch]
            .iter()
            .any(|loss| loss.is_some())
    }

    /// Panics unless the shape of all counts fits the scores.
    fn check(&self, op: &str, [rows, e]: [usize; 2]) {
        let all = [&self.micro_batch, &self.sequences, &self.global_batch];
        for counts in all.into_iter().flatten().map(|loss| &loss.counts) {
            arg_check::check(op, [float("counts", counts)]);
            let [sequences, experts] = counts.dims();
            assert!(
                experts == e && sequences > 0 && rows.is_multiple_of(sequences),
                "{op}: counts {:?} do not match scores [{rows}, {e}]",
                counts.dims()
            );
        }
    }
}

/// Computes the gradients and values of the losses, off the autodiff device. On a GPU this takes
/// one kernel and a sum over tokens.
///
/// # Shapes
/// - `logits`, `scores`: `[s * b, e]` in f32; for each position, the rows of all sequences follow
///   each other
/// - `counted`: `[s * b, 1]` in f32, 1 for tokens that count and 0 for others; with `None` all
///   count
///
/// # Panics
/// If the shapes do not fit.
#[must_use]
pub fn router_losses(
    logits: Tensor<2>,
    scores: Tensor<2>,
    counted: Option<Tensor<2>>,
    losses: &RouterLosses,
) -> RouterLossTerms {
    let name = "router_losses";
    arg_check::check(name, [float("logits", &logits), float("scores", &scores)]);
    let [rows, e] = scores.dims();
    assert_eq!(
        logits.dims(),
        [rows, e],
        "{name}: the shapes of logits and scores differ"
    );
    if let Some(counted) = &counted {
        assert_eq!(
            counted.dims(),
            [rows, 1],
            "{name}: the mask of counted tokens must be [tokens, 1]"
        );
    }
    losses.check(name, [rows, e]);
    #[cfg(feature = "cuda")]
    if launch::takes(&scores) {
        return launch::terms(logits, scores, counted, losses);
    }
    reference::terms(logits, scores, counted, losses)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, TensorData};
    use megaburn_autograd::testing::{assert_close, assert_refused, leaf, normal, values};
    use rstest::rstest;

    use super::*;
    use crate::router_scores;

    /// The sum of all losses with their factors by their definitions, and the expected `sums`.
    fn defined(
        logits: Tensor<2>,
        counted: &Tensor<2>,
        losses: &RouterLosses,
    ) -> (Tensor<1>, Tensor<1>) {
        let scores = router_scores(logits.clone(), losses.scores);
        let probabilities = scores.clone() / scores.sum_dim(1);
        let counted_probabilities = probabilities * counted.clone();
        let [rows, e] = counted_probabilities.dims();
        let value = |loss: &BalanceLoss| {
            let [sequences, _] = loss.counts.dims();
            let share = loss.counts.clone() * e as f64 / loss.counts.clone().sum_dim(1);
            let share = share
                .reshape([1, sequences, e])
                .expand([rows / sequences, sequences, e]);
            let share =
                Tensor::<2>::from_data(share.reshape([rows, e]).into_data(), &logits.device());
            (counted_probabilities.clone() * share).sum()
        };
        let z = (logits.clone().exp().sum_dim(1).log().square() * counted.clone()).sum();
        let zero = || z.clone() * 0.0;
        let all = [&losses.micro_batch, &losses.sequences, &losses.global_batch];
        let values = all.map(|loss| loss.as_ref().map_or_else(zero, value));
        let factors = all.map(|loss| loss.as_ref().map_or(0.0, |loss| loss.factor));
        let mut total = z.clone() * losses.z_loss.unwrap_or(0.0);
        for (value, factor) in values.iter().zip(factors) {
            total = total + value.clone() * factor;
        }
        let [aux, seq_aux, _] = values;
        let z = if losses.z_loss.is_some() { z } else { zero() };
        let all = counted_probabilities.sum_dim(0).reshape([e]);
        (total, Tensor::cat(vec![aux, seq_aux, z, all], 0))
    }

    fn counts(sequences: usize, e: usize, factor: f64) -> Option<BalanceLoss> {
        let of = Distribution::Uniform(0.0, 40.0);
        // Positive integers.
        let counts = Tensor::<2>::random([sequences, e], of, &Device::flex()).round() + 1.0;
        Some(BalanceLoss { counts, factor })
    }

    #[rstest]
    #[case::all([3, 2, 8], [true, true, true], Some(0.02))]
    #[case::ragged([5, 3, 7], [false, true, false], None)]
    #[case::one_expert([4, 1, 1], [true, false, false], Some(0.5))]
    #[case::z_alone([2, 2, 5], [false; 3], Some(0.1))]
    #[case::of_the_last_batch([2, 2, 40], [false, false, true], None)]
    fn gradients_and_values_are_those_of_the_definition(
        #[case] shape: [usize; 3],
        #[case] balance: [bool; 3],
        #[case] z_loss: Option<f64>,
        #[values(RouterScores::Softmax, RouterScores::Sigmoid)] scores: RouterScores,
        #[values(false, true)] padded: bool,
    ) {
        let [s, b, e] = shape;
        let [micro_batch, sequences, global_batch] = balance;
        let losses = RouterLosses {
            scores,
            micro_batch: micro_batch.then(|| counts(1, e, 0.3)).flatten(),
            sequences: sequences.then(|| counts(b, e, 0.7)).flatten(),
            global_batch: global_batch.then(|| counts(1, e, 1.1)).flatten(),
            z_loss,
        };
        let rows = s * b;
        let counted: Vec<f32> = (0..rows)
            .map(|row| f32::from(!padded || row % 3 > 0))
            .collect();
        let counted = Tensor::<2>::from_data(TensorData::new(counted, [rows, 1]), &Device::flex());
        let logits = leaf(normal([rows, e]));
        let on_graph = Tensor::from_inner(counted.clone());
        let (total, values) = defined(logits.clone(), &on_graph, &losses);
        let expected = logits.grad(&total.backward()).unwrap();

        let plain = logits.inner();
        let of = router_scores(plain.clone(), scores);
        let found = router_losses(plain.clone(), of, padded.then_some(counted), &losses);
        assert_close(found.sums, values.inner(), 1e-5);
        assert_eq!(found.gradients.of_scores.is_some(), losses.has_balance());
        assert_eq!(found.gradients.of_logits.is_some(), z_loss.is_some());
        // Backpropagate through the scores, as the router does.
        let again = leaf(plain);
        let mut whole = again.zeros_like().inner();
        if let Some(of_scores) = found.gradients.of_scores {
            let weights = Tensor::from_inner(of_scores);
            let through = (router_scores(again.clone(), scores) * weights)
                .sum()
                .backward();
            whole = whole + again.grad(&through).unwrap();
        }
        if let Some(of_logits) = found.gradients.of_logits {
            whole = whole + of_logits;
        }
        assert_close(whole, expected, 2e-5);
    }

    #[test]
    fn no_tokens_have_losses_of_0() {
        let none = || Tensor::<2>::zeros([0, 4], (&Device::flex(), DType::F32));
        let losses = RouterLosses {
            scores: RouterScores::Softmax,
            micro_batch: counts(1, 4, 1.0),
            sequences: counts(2, 4, 1.0),
            global_batch: None,
            z_loss: Some(1.0),
        };
        let found = router_losses(none(), none(), None, &losses);
        assert_eq!(values(found.sums), [0.0; 7]);
        assert_eq!(found.gradients.of_scores.unwrap().dims(), [0, 4]);
    }

    #[test]
    fn counts_of_other_experts_are_refused() {
        let losses = RouterLosses {
            scores: RouterScores::Softmax,
            micro_batch: counts(1, 5, 1.0),
            sequences: None,
            global_batch: None,
            z_loss: None,
        };
        let x = || Tensor::<2>::zeros([6, 4], &Device::flex());
        let message = "router_losses: counts [1, 5] do not match scores [6, 4]";
        assert_refused(|| router_losses(x(), x(), None, &losses), message);
    }
}
