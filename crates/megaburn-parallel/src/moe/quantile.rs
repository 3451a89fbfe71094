//! Biases with which every expert is chosen by equally many tokens of a batch.
//!
//! A token chooses expert `e` if `s_e + b_e` is above its cutoff, the best score that it does not
//! choose. So `e` is chosen by the tokens whose margin, `cutoff - s_e`, is below `b_e`, and the
//! `k / E` quantile of the margins is the bias with which a share of `k / E` of the tokens choose
//! it. Margins are counted in bins, whose sums over ranks and micro-batches do not depend on the
//! layout.
//!
//! Source: Su (2026), <https://kexue.fm/archives/11619>; Megatron-LM
//! `--moe-router-load-balancing-type quantile_balancing`.

/// Number of margin bins per expert.
pub const QUANTILE_BINS: usize = 1000;

/// The range of the margins, for scores from 0 to 1 and these biases.
fn range(biases: &[f32]) -> [f64; 2] {
    let [min, max] = [
        biases.iter().copied().fold(f32::INFINITY, f32::min),
        biases.iter().copied().fold(f32::NEG_INFINITY, f32::max),
    ];
    [f64::from(min) - 1.0, f64::from(max) + 1.0]
}

/// Counts the margins of tokens that go to `top_k` experts.
///
/// # Shapes
/// `scores`: `e` per token; `bins`: `e * QUANTILE_BINS`
pub(super) fn count_quantiles<'a>(
    scores: impl Iterator<Item = &'a [f32]>,
    biases: &[f32],
    top_k: usize,
    bins: &mut [u64],
) {
    let [start, end] = range(biases);
    let width = (end - start) / QUANTILE_BINS as f64;
    let mut by = vec![0.0; biases.len()];
    for scores in scores {
        by.iter_mut()
            .zip(scores.iter().zip(biases))
            .for_each(|(by, (s, b))| *by = s + b);
        by.sort_unstable_by(|a, b| b.total_cmp(a));
        let cutoff = by[top_k];
        for (expert, score) in scores.iter().enumerate() {
            let bin = ((f64::from(cutoff - score) - start) / width).max(0.0) as usize;
            bins[expert * QUANTILE_BINS + bin.min(QUANTILE_BINS - 1)] += 1;
        }
    }
}

/// The next biases, whose mean is 0; the current ones if nothing was counted.
///
/// # Shapes
/// `bins`: `e * QUANTILE_BINS`, counted with `biases`
pub fn quantile_biases(bins: &[u64], biases: &[f32], top_k: usize) -> Vec<f32> {
    let [start, end] = range(biases);
    let width = (end - start) / QUANTILE_BINS as f64;
    let share = top_k as f64 / biases.len() as f64;
    let quantile = |bins: &[u64]| {
        let wanted = share * bins.iter().sum::<u64>() as f64;
        let mut below = 0.0;
        for (bin, &count) in bins.iter().enumerate() {
            let count = count as f64;
            if count > 0.0 && below + count >= wanted {
                return start + width * (bin as f64 + (wanted - below) / count);
            }
            below += count;
        }
        end
    };
    if bins.iter().all(|&count| count == 0) {
        return biases.to_vec();
    }
    let next: Vec<f64> = bins.chunks_exact(QUANTILE_BINS).map(quantile).collect();
    let mean = next.iter().sum::<f64>() / next.len() as f64;
    next.into_iter().map(|bias| (bias - mean) as f32).collect()
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::{PositionRng, Purpose};

    use super::*;

    #[test]
    fn a_batch_routed_again_with_its_own_biases_is_balanced() {
        let tokens = 4000usize;
        let experts = 8usize;
        let top_k = 2usize;
        // Some experts get higher scores than others.
        let rng = PositionRng::new(3, Purpose::Sampling, "scores");
        let score = |token: usize, expert: usize| {
            let noise = rng.below((token * experts + expert) as u64, 1 << 20) as f32;
            0.5 * noise / (1 << 20) as f32 + 0.05 * expert as f32
        };
        let scores: Vec<Vec<f32>> = (0..tokens)
            .map(|t| (0..experts).map(|e| score(t, e)).collect())
            .collect();
        let load = |biases: &[f32]| {
            let mut load = vec![0; experts];
            for row in &scores {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| (row[b] + biases[b]).total_cmp(&(row[a] + biases[a])));
                order[..top_k].iter().for_each(|&expert| load[expert] += 1);
            }
            load
        };
        let mut biases = vec![0.0; experts];
        let before = load(&biases);
        assert!(before.iter().any(|&own| own > 1500) && before.iter().any(|&own| own < 500));
        for _ in 0..5 {
            let mut bins = vec![0; experts * QUANTILE_BINS];
            count_quantiles(scores.iter().map(Vec::as_slice), &biases, top_k, &mut bins);
            biases = quantile_biases(&bins, &biases, top_k);
        }
        let after = load(&biases);
        assert!(
            after.iter().all(|&own: &i32| (own - 1000).abs() < 100),
            "{after:?}"
        );
        assert!(biases.iter().sum::<f32>().abs() < 1e-5);
    }

    #[test]
    fn without_tokens_biases_stay() {
        assert_eq!(
            quantile_biases(&[0; 2 * QUANTILE_BINS], &[0.25, -0.25], 1),
            [0.25, -0.25]
        );
    }
}
