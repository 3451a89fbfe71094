//! The largest score of each head, as clipping of queries and keys needs it.

use std::ops::Range;

use burn::tensor::{Bool, DType, Int, Tensor};
use megaburn_autograd::backend_ops::compute_dtype;

use super::{
    checked,
    options::{AttentionOptions, Piece},
};
use crate::gemm_ops::{ProductOptions, multiply_with};

/// Scores that are computed at a time.
const MAX_SCORES: usize = 1 << 25;

/// The largest score `q k^T * scale` of each query head over all queries and the keys that they see,
/// before soft caps and dropout. A head whose queries see no key has minus infinity.
///
/// It is composed of products of a block of queries with the keys that the block sees, on every
/// device, through cuBLASLt on CUDA. A fused kernel of [`attention`](crate::attention) does not return this number, and its
/// log-sum-exp only bounds it, so this is a second product of queries and keys, in f32 (f64 for f64).
/// The tensors must be without autodiff.
///
/// # Shapes
/// - `q`: `[s_q, b, hq, d]`, `k`: `[s_k, b, hkv, d]`
/// - result: `[hq]`, in f32 (f64 for f64)
///
/// # Panics
/// As [`attention`](crate::attention).
///
/// Source: Kimi Team, "Kimi K2" (2025), <https://arxiv.org/abs/2507.20534>, section 2.1.
pub fn largest_scores(q: Tensor<4>, k: Tensor<4>, options: AttentionOptions) -> Tensor<1> {
    let options = checked([&q, &k, &k], options);
    let [s_q, b, hq, d] = q.dims();
    let s_k = k.dims()[0];
    let dtype = compute_dtype(q.dtype());
    let scale = options.factor(d);
    let mut largest: Tensor<1> =
        Tensor::full([hq], f32::NEG_INFINITY, (&q.device(), DType::from(dtype)));
    let product = ProductOptions::new(dtype).with_scale(scale);
    for piece in options.pieces(b, s_q, s_k) {
        let Piece {
            rows,
            queries,
            keys,
            options,
        } = piece;
        if queries.is_empty() || keys.is_empty() {
            continue;
        }
        let per_query = rows.len() * hq * keys.len();
        let len = (MAX_SCORES / per_query).clamp(1, queries.len());
        for start in (0..queries.len()).step_by(len) {
            let block = start..(start + len).min(queries.len());
            let seen = options.visible_to_any(block.clone(), keys.len());
            let q = part(&q, &rows, &shifted(&block, queries.start));
            let k = part(&k, &rows, &shifted(&seen, keys.start));
            let scores = largest_visible(products(q, k, product), &block, &seen, &options);
            largest = largest.max_pair(scores);
        }
    }
    largest
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

/// Positions `of` some rows of the batch.
fn part(x: &Tensor<4>, rows: &Range<usize>, of: &Range<usize>) -> Tensor<4> {
    x.clone()
        .narrow(0, of.start, of.len())
        .narrow(1, rows.start, rows.len())
}

/// The products of queries and keys, `[b, hq, s_q, s_k]`. The heads that share keys are rows of one
/// product.
fn products(q: Tensor<4>, k: Tensor<4>, options: ProductOptions) -> Tensor<4> {
    let [s_q, b, hq, d] = q.dims();
    let [s_k, _, hkv, _] = k.dims();
    let group = hq / hkv;
    let q = q.reshape([s_q, b, hkv, group, d]).permute([1, 2, 3, 0, 4]);
    let q: Tensor<4> = q.reshape([b, hkv, group * s_q, d]);
    let scores = multiply_with(q, k.permute([1, 2, 3, 0]), options);
    scores.reshape([b, hq, s_q, s_k])
}

/// The largest score of each head that is not hidden. `queries` and `keys` are the positions of the
/// scores in their piece.
fn largest_visible(
    scores: Tensor<4>,
    queries: &Range<usize>,
    keys: &Range<usize>,
    options: &AttentionOptions,
) -> Tensor<1> {
    let [_, hq, s_q, s_k] = scores.dims();
    let device = scores.device();
    let at = |range: Range<usize>| {
        Tensor::<1, Int>::arange(range.start as i64..range.end as i64, &device)
    };
    let position = at(shifted(queries, options.query_offset)).reshape([s_q, 1]);
    let key = at(keys.clone()).reshape([1, s_k]);
    let [position, key]: [Tensor<2, Int>; 2] = [position, key].map(|x| x.expand([s_q, s_k]));
    let mut scores = scores;
    let mut hide = |hidden: Tensor<2, Bool>| {
        let hidden = hidden.reshape([1, 1, s_q, s_k]).expand(scores.dims());
        scores = scores.clone().mask_fill(hidden, f32::NEG_INFINITY);
    };
    if options.causal {
        hide(key.clone().greater(position.clone()));
    }
    if let Some(window) = options.window {
        hide(position.greater_equal(key + window.min(i32::MAX as usize) as i64));
    }
    // Of each query first: a maximum over few long rows would leave most of a GPU idle.
    let of_queries = scores.max_dim(3).swap_dims(0, 1).reshape([hq as i32, -1]);
    let largest: Tensor<2> = of_queries.max_dim(1);
    largest.reshape([hq])
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{normal, values};
    use rstest::rstest;

    use super::*;
    use crate::attention::{PackedSequences, reference::hidden};

    /// The largest scores by their definition.
    fn expected(q: &Tensor<4>, k: &Tensor<4>, options: &AttentionOptions) -> Vec<f64> {
        let [s_q, b, hq, d] = q.dims();
        let [s_k, _, hkv, _] = k.dims();
        let hidden = hidden([b, s_q, s_k], options);
        let [q, k] = [values(q.clone()), values(k.clone())];
        let mut largest = vec![f64::NEG_INFINITY; hq];
        for (at, _) in hidden.iter().enumerate().filter(|(_, hidden)| !**hidden) {
            let [row, i, j] = [at / (s_q * s_k), at / s_k % s_q, at % s_k];
            for (head, largest) in largest.iter_mut().enumerate() {
                let q = &q[((i * b + row) * hq + head) * d..][..d];
                let k = &k[((j * b + row) * hkv + head * hkv / hq) * d..][..d];
                let product: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                *largest = largest.max(product * options.factor(d));
            }
        }
        largest
    }

    fn options(causal: bool, query_offset: usize, window: Option<usize>) -> AttentionOptions {
        AttentionOptions {
            causal,
            query_offset,
            window,
            ..Default::default()
        }
    }

    #[rstest]
    #[case::all_keys([6, 6, 2, 4, 2, 8], options(false, 0, None))]
    #[case::causal([8, 8, 2, 4, 2, 8], options(true, 0, None))]
    #[case::ragged([5, 11, 3, 6, 3, 5], options(true, 4, None))]
    #[case::window([9, 9, 2, 4, 4, 4], options(true, 0, Some(3)))]
    #[case::window_of_both_sides([9, 7, 1, 2, 1, 4], options(false, 2, Some(2)))]
    #[case::nothing_is_seen([3, 4, 1, 2, 1, 4], options(false, 9, Some(2)))]
    #[case::scaled([7, 7, 1, 2, 2, 3], AttentionOptions {
        scale: Some(-0.7),
        soft_cap: Some(0.5),
        ..options(true, 0, None)
    })]
    #[case::packed([7, 7, 2, 4, 2, 4], AttentionOptions {
        sequences: Some(PackedSequences::new([[0, 3, 7], [0, 1, 7]])),
        ..options(true, 0, Some(4))
    })]
    fn it_is_the_largest_visible_score(
        #[case] sizes: [usize; 6],
        #[case] options: AttentionOptions,
    ) {
        let [s_q, s_k, b, hq, hkv, d] = sizes;
        let q = normal([s_q, b, hq, d]).inner();
        let k = normal([s_k, b, hkv, d]).inner();
        let expected = expected(&q, &k, &options);
        let found = values(largest_scores(q, k, options));
        assert_eq!(found.len(), hq);
        for (found, expected) in found.into_iter().zip(expected) {
            assert!(
                found == expected || (found - expected).abs() < 1e-5,
                "{found} is not {expected}"
            );
        }
    }

    #[test]
    fn long_sequences_are_read_in_blocks() {
        // Each block has 8192 queries.
        let q = normal([9000, 1, 1, 1]).inner();
        let k = normal([4096, 1, 1, 1]).inner();
        let [all, keys] = [values(q.clone()), values(k.clone())];
        let largest = |x: &[f64]| x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let smallest = |x: &[f64]| x.iter().copied().fold(f64::INFINITY, f64::min);
        let both = (largest(&all) * largest(&keys)).max(smallest(&all) * smallest(&keys));
        let found = values(largest_scores(q, k, AttentionOptions::default()))[0];
        assert!((found - both).abs() < 1e-5, "{found} is not {both}");
    }
}
