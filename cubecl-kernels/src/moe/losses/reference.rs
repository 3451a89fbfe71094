//! The router losses and their gradients by their definitions. Sums over tokens are in a fixed
//! order, which Burn's own sums do not have on GPUs.

use burn::tensor::{DType, Tensor};

use super::{BalanceLoss, RouterGradients, RouterLossTerms, RouterLosses, RouterScores};
use crate::moe::router::TINY;
use crate::sum::{sum_all, sum_columns};

pub(super) fn terms(
    logits: Tensor<2>,
    scores: Tensor<2>,
    counted: Option<Tensor<2>>,
    losses: &RouterLosses,
) -> RouterLossTerms {
    let [rows, e] = scores.dims();
    let device = scores.device();
    let zeros = |len: usize| Tensor::<1>::zeros([len], (&device, DType::F32));
    if rows == 0 {
        let of_scores = losses.has_balance().then(|| scores.clone());
        let of_logits = losses.z_loss.map(|_| scores);
        let gradients = RouterGradients {
            of_scores,
            of_logits,
        };
        return RouterLossTerms {
            gradients,
            sums: zeros(super::NUM_VALUES + e),
        };
    }
    let masked = |x: Tensor<2>| match &counted {
        Some(counted) => x * counted.clone(),
        None => x,
    };
    let sum = scores.clone().sum_dim(1) + TINY;
    let probabilities = match losses.scores {
        RouterScores::Softmax => scores,
        RouterScores::Sigmoid => scores / sum.clone(),
    };
    let counted_probabilities = masked(probabilities.clone());
    // The gradient of each probability, without the loss's factor.
    let shares = |loss: &Option<BalanceLoss>| {
        let counts = &loss.as_ref()?.counts;
        let [sequences, _] = counts.dims();
        let share = counts.clone() * e as f64 / counts.clone().sum_dim(1).clamp_min(1.0);
        let all = share
            .reshape([1, sequences, e])
            .expand([rows / sequences, sequences, e]);
        Some(all.reshape([rows, e]))
    };
    let all = [&losses.micro_batch, &losses.sequences, &losses.global_batch];
    let weights = all.map(shares);
    let value = |weights: &Option<Tensor<2>>| match weights {
        Some(weights) => sum_all(counted_probabilities.clone() * weights.clone()),
        None => zeros(1),
    };
    let aux = value(&weights[0]);
    let seq_aux = value(&weights[1]);
    let weighed = all.into_iter().zip(weights);
    let weighed = weighed.filter_map(|(loss, weights)| Some(weights? * loss.as_ref()?.factor));
    let of_scores = weighed
        .reduce(|a, b| a + b)
        .map(masked)
        .map(|weights| match losses.scores {
            RouterScores::Softmax => weights,
            // The gradient through the division of each score by the sum of all.
            RouterScores::Sigmoid => {
                let mean = (weights.clone() * probabilities.clone()).sum_dim(1);
                (weights - mean) / sum.clone()
            }
        });
    let (of_logits, z) = match losses.z_loss {
        Some(factor) => {
            let (gradient, squares) = z_loss(logits.cast(DType::F32));
            (Some(masked(gradient) * factor), sum_all(masked(squares)))
        }
        None => (None, zeros(1)),
    };
    let of_experts = sum_columns(counted_probabilities).reshape([e]);
    let sums = Tensor::cat(vec![aux, seq_aux, z, of_experts], 0);
    RouterLossTerms {
        gradients: RouterGradients {
            of_scores,
            of_logits,
        },
        sums,
    }
}

/// Returns the gradient of the sum over rows of the squared log-sum-exp, and these squares as
/// `[rows, 1]`.
fn z_loss(logits: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
    let max = logits.clone().max_dim(1);
    let exp = (logits - max.clone()).exp();
    let sum = exp.clone().sum_dim(1);
    let lse = sum.clone().log() + max;
    let squares = lse.clone() * lse.clone();
    (exp / sum * lse * 2.0, squares)
}
