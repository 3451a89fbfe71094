use burn::tensor::TensorData;
use megaburn_collective::{CollectiveError, Group, ReduceOp};

/// The biases to add to the experts' logits so that all experts are chosen equally often. They are
/// the logarithms of the factors by which Sinkhorn's algorithm scales the columns of `exp(logits)`,
/// over the tokens of the micro-batch that count. The factors of the rows change no choice.
///
/// Source: Sinkhorn and Knopp (1967); Clark et al. (2022), <https://arxiv.org/abs/2202.01169>;
/// Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `sinkhorn`.
///
/// # Collective
/// The ranks that share the micro-batch: one small all-reduce, of one number per expert, per
/// iteration.
pub(super) fn sinkhorn_biases(
    logits: &[f32],
    num_experts: usize,
    counted: Option<&[bool]>,
    group: &Group,
) -> Result<Vec<f32>, CollectiveError> {
    let loss_mask_values = |token: usize| counted.is_none_or(|counted| counted[token]);
    let rows = logits.chunks_exact(num_experts).enumerate();
    let rows = rows
        .filter(|(token, _)| loss_mask_values(*token))
        .map(|(_, row)| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter()
                .map(|logit| f64::from(logit - max).exp())
                .collect()
        });
    let rows: Vec<Vec<f64>> = rows.collect();
    let mut factors = vec![1.0; num_experts];
    for _ in 0..MOST_ROUNDS {
        let mut sums = vec![0.0; num_experts];
        for row in &rows {
            let of_row: f64 = row
                .iter()
                .zip(&factors)
                .map(|(value, factor)| value * factor)
                .sum();
            sums.iter_mut()
                .zip(row)
                .for_each(|(sum, value)| *sum += value / (of_row + TINY));
        }
        let sums = group.all_reduce(TensorData::new(sums, [num_experts]), ReduceOp::Sum)?;
        let sums: Vec<f64> = sums.try_to_vec().expect("the tensor is f64");
        let total: f64 = sums
            .iter()
            .zip(&factors)
            .map(|(sum, factor)| sum * factor)
            .sum();
        let share = total / num_experts as f64;
        let next: Vec<f64> = sums.iter().map(|sum| share / (sum + TINY)).collect();
        let size: f64 = factors.iter().sum();
        let moved: f64 = next.iter().zip(&factors).map(|(a, b)| (a - b).abs()).sum();
        factors = next;
        if moved <= CLOSE * size {
            break;
        }
    }
    Ok(factors
        .into_iter()
        .map(|factor| (factor + TINY).ln() as f32)
        .collect())
}

/// Most iterations, for factors that do not converge.
const MOST_ROUNDS: usize = 100;
/// Relative change of the factors below which they have converged.
const CLOSE: f64 = 1e-4;
/// Added to divisors, against division by zero.
const TINY: f64 = 1e-8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_that_all_tokens_like_are_liked_alike() {
        // All tokens prefer the first expert, some the second.
        let logits: Vec<f32> = (0..64)
            .flat_map(|t| {
                [
                    3.0 + (t % 7) as f32 * 0.1,
                    (t % 5) as f32,
                    (t % 3) as f32 * 0.5,
                    0.0,
                ]
            })
            .collect();
        let biases = sinkhorn_biases(&logits, 4, None, &Group::single(0)).unwrap();
        let share = |expert: usize, biases: &[f32]| -> f64 {
            let of = logits.chunks(4).map(|row| {
                let all: Vec<f64> = row
                    .iter()
                    .zip(biases)
                    .map(|(l, b)| f64::from(l + b).exp())
                    .collect();
                all[expert] / all.iter().sum::<f64>()
            });
            of.sum::<f64>() / 16.0
        };
        for expert in 0..4 {
            assert!((share(expert, &biases) - 1.0).abs() < 1e-2, "{biases:?}");
        }
        assert!(share(0, &[0.0; 4]) > 1.5);
        // Padding is ignored.
        let mut padded = logits.clone();
        padded.extend([0.0, 0.0, 0.0, 90.0]);
        let counted: Vec<bool> = (0..65).map(|token| token < 64).collect();
        let found = sinkhorn_biases(&padded, 4, Some(&counted), &Group::single(0)).unwrap();
        assert_eq!(found, biases);
    }

    #[test]
    fn without_tokens_nothing_is_added() {
        let biases = sinkhorn_biases(&[], 3, None, &Group::single(0)).unwrap();
        assert!(
            biases
                .windows(2)
                .all(|pair| pair[0] == pair[1] && pair[0].is_finite())
        );
    }
}
