//! Partial attention composed of products and exponentials, one block of queries at a time. At most
//! one block's scores are in memory, and keys that no query of the block sees are skipped.

use std::ops::Range;

use burn::tensor::{Bool, DType, Tensor, TensorData};
use megaburn_autograd::backend_ops::compute_dtype;

use super::partial_attention::{LOWEST, PartialAttention};
use crate::attention::options::{AttentionDropout, AttentionOptions, Piece};
use crate::attention::reference::{by_head, by_query_and_key, hidden};
use crate::gemm_ops::multiply;

/// Queries are computed in at most `MAX_BLOCKS` blocks, of at least `MIN_BLOCK` queries.
const MIN_BLOCK: usize = 32;
const MAX_BLOCKS: usize = 8;

/// The blocks of queries of each sequence, with the keys that some of them see.
fn blocks(options: &AttentionOptions, [b, s_q, s_k]: [usize; 3]) -> Vec<Piece> {
    let pieces = options.pieces(b, s_q, s_k).into_iter();
    let pieces = pieces.filter(|piece| !piece.queries.is_empty() && !piece.keys.is_empty());
    let cut = |piece: Piece| {
        let len = piece.queries.len();
        let step = len.div_ceil(MAX_BLOCKS).max(MIN_BLOCK);
        (0..len).step_by(step).map(move |start| {
            let end = (start + step).min(len);
            let seen = piece.options.visible_to_any(start..end, piece.keys.len());
            let dropout = piece
                .options
                .dropout
                .clone()
                .map(|AttentionDropout { p, key }| AttentionDropout {
                    p,
                    key: key.moved(2, start).moved(3, seen.start),
                });
            let query_offset = piece.options.query_offset + start - seen.start;
            Piece {
                rows: piece.rows.clone(),
                queries: piece.queries.start + start..piece.queries.start + end,
                keys: piece.keys.start + seen.start..piece.keys.start + seen.end,
                options: AttentionOptions {
                    query_offset,
                    dropout,
                    ..piece.options.clone()
                },
            }
        })
    };
    pieces.flat_map(cut).collect()
}

/// Slices positions and rows of the batch of `[s, b, h, d]`.
fn cut(x: &Tensor<4>, positions: &Range<usize>, rows: &Range<usize>) -> Tensor<4> {
    x.clone()
        .narrow(0, positions.start, positions.len())
        .narrow(1, rows.start, rows.len())
}

/// Assigns `part` to positions and rows of the batch of `x`.
fn put(x: Tensor<4>, positions: &Range<usize>, rows: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let [_, _, h, d] = x.dims();
    x.slice_assign([positions.clone(), rows.clone(), 0..h, 0..d], part)
}

/// The columns of a bias of `s_q` queries that some queries and keys need.
fn columns(s_q: usize, queries: &Range<usize>, keys: &Range<usize>) -> Range<usize> {
    let start = keys.start + s_q - queries.end;
    start..start + queries.len() + keys.len() - 1
}

pub(super) fn forward(
    [q, k, v]: &[Tensor<4>; 3],
    bias: Option<&Tensor<2>>,
    options: &AttentionOptions,
) -> PartialAttention {
    let [s_q, b, hq, _] = q.dims();
    let [s_k, .., d_v] = v.dims();
    let dtype = q.dtype();
    let wide = compute_dtype(dtype);
    let on = (&q.device(), DType::from(wide));
    let mut out = Tensor::zeros([s_q, b, hq, d_v], on);
    let mut lse = Tensor::full([b, hq, s_q], f32::NEG_INFINITY, on);
    for Piece {
        rows,
        queries,
        keys,
        options,
    } in blocks(options, [b, s_q, s_k])
    {
        let v = by_head(&cut(v, &keys, &rows), hq, wide);
        let line = bias.map(|bias| bias.clone().slice([0..hq, columns(s_q, &queries, &keys)]));
        let of_q = cut(q, &queries, &rows);
        let weights = Weights::of(&of_q, &cut(k, &keys, &rows), line, &options);
        let highest = weights.scores.clone().max_dim(3).clamp_min(LOWEST);
        let sum = (weights.scores.clone() - highest.clone()).exp().sum_dim(3);
        let of_block = (sum.log() + highest).squeeze_dim::<3>(3);
        let attended = multiply(weights.dropped(weights.probabilities(&of_block)), v);
        lse = lse.slice_assign([rows.clone(), 0..hq, queries.clone()], of_block);
        out = put(out, &queries, &rows, attended.permute([2, 0, 1, 3]));
    }
    PartialAttention {
        out: out.cast(dtype),
        lse,
    }
}

pub(super) fn backward(
    inputs: &[Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    whole: &PartialAttention,
    dout: &Tensor<4>,
    options: &AttentionOptions,
) -> ([Tensor<4>; 3], Option<Tensor<2>>) {
    let [q, k, v] = inputs;
    let [s_q, b, hq, d] = q.dims();
    let [s_k, _, hkv, _] = k.dims();
    let wide = compute_dtype(q.dtype());
    let on = (&q.device(), DType::from(wide));
    let mut sums = inputs.each_ref().map(|x| Tensor::<4>::zeros(x.dims(), on));
    let mut dbias = bias
        .as_ref()
        .map(|bias| Tensor::<2>::zeros(bias.dims(), on));
    for Piece {
        rows,
        queries,
        keys,
        options,
    } in blocks(options, [b, s_q, s_k])
    {
        let of_queries = |x: &Tensor<4>| cut(x, &queries, &rows).cast(wide).permute([1, 2, 0, 3]);
        let [out, dout] = [&whole.out, dout].map(of_queries);
        let lse = whole
            .lse
            .clone()
            .cast(wide)
            .narrow(0, rows.start, rows.len());
        let lse = lse.narrow(2, queries.start, queries.len());
        let of_q = cut(q, &queries, &rows);
        let of_k = cut(k, &keys, &rows);
        let of_v = cut(v, &keys, &rows);
        let at = [0..hq, columns(s_q, &queries, &keys)];
        let line = bias.as_ref().map(|bias| bias.clone().slice(at.clone()));
        let weights = Weights::of(&of_q, &of_k, line, &options);
        let [of_q, of_k, of_v] = [of_q, of_k, of_v].map(|x| by_head(&x, hq, wide));
        let p = weights.probabilities(&lse);
        let dp = weights.dropped(multiply(dout.clone(), of_v.transpose()));
        let dv = multiply(weights.dropped(p.clone()).transpose(), dout.clone());
        let mut ds = p * (dp - (out * dout).sum_dim(3));
        dbias = dbias.map(|all| {
            let sum = all.clone().slice(at.clone()) + diagonals(ds.clone().sum_dim(0));
            all.slice_assign(at, sum)
        });
        if let Some(slope) = weights.slope {
            ds = ds * slope;
        }
        let ds = ds * options.factor(d);
        let dk = multiply(ds.clone().transpose(), of_q);
        let dq = multiply(ds, of_k);
        // Sums over the query heads that share a key and value head.
        let summed = |x: Tensor<4>| {
            let [b, _, s, d] = x.dims();
            x.reshape([b, hkv, hq / hkv, s, d])
                .sum_dim(2)
                .squeeze_dim::<4>(2)
        };
        let found = [dq, summed(dk), summed(dv)].map(|x| x.permute([2, 0, 1, 3]));
        for ((sum, found), positions) in sums.iter_mut().zip(found).zip([&queries, &keys, &keys]) {
            let found = cut(sum, positions, &rows) + found;
            *sum = put(sum.clone(), positions, &rows, found);
        }
    }
    let mut sums = sums
        .into_iter()
        .zip(inputs)
        .map(|(sum, x)| sum.cast(x.dtype()));
    let gradients = std::array::from_fn(|_| sums.next().expect("there is one sum per input"));
    let dbias = dbias.zip(bias);
    (gradients, dbias.map(|(sum, bias)| sum.cast(bias.dtype())))
}

/// The sums over the diagonals of `[1, hq, s_q, s_k]`, `[hq, s_q + s_k - 1]`.
fn diagonals(x: Tensor<4>) -> Tensor<2> {
    let [_, hq, s_q, s_k] = x.dims();
    let mut sums = Tensor::zeros([hq, s_q + s_k - 1], (&x.device(), x.dtype()));
    for i in 0..s_q {
        let at = [0..hq, s_q - 1 - i..s_q - 1 - i + s_k];
        let row = x.clone().narrow(2, i, 1).reshape([hq, s_k]);
        let row = sums.clone().slice(at.clone()) + row;
        sums = sums.slice_assign(at, row);
    }
    sums
}

/// The scores of a block, computed by their definition.
struct Weights {
    /// `[b, hq, s_q, s_k]` in the compute dtype, minus infinity where a query does not see a key.
    scores: Tensor<4>,
    /// The derivative of the soft-capped scores by the uncapped ones.
    slope: Option<Tensor<4>>,
    /// The dropout factors of the probabilities.
    kept: Option<Tensor<4>>,
}

impl Weights {
    fn of(
        q: &Tensor<4>,
        k: &Tensor<4>,
        bias: Option<Tensor<2>>,
        options: &AttentionOptions,
    ) -> Self {
        let [s_q, b, hq, d] = q.dims();
        let s_k = k.dims()[0];
        let device = q.device();
        let dtype = compute_dtype(q.dtype());
        let keys = by_head(k, hq, dtype).transpose();
        let products = multiply(by_head(q, hq, dtype), keys) * options.factor(d);
        let (scores, slope) = match options.soft_cap {
            Some(cap) => {
                let share = (products / cap).tanh();
                (share.clone() * cap, Some(share.square().neg() + 1.0))
            }
            None => (products, None),
        };
        let scores = match bias {
            Some(bias) => scores + by_query_and_key(bias, s_q).cast(dtype).unsqueeze_dim(0),
            None => scores,
        };
        // A piece has the same mask in all rows of the batch.
        let hidden = TensorData::new(hidden([1, s_q, s_k], options), [1, 1, s_q, s_k]);
        let hidden = Tensor::<4, Bool>::from_data(hidden, &device);
        let shape = [b, hq, s_q, s_k];
        let scores = scores.mask_fill(hidden.expand(shape), f32::NEG_INFINITY);
        let kept = options.dropout.as_ref().map(|AttentionDropout { p, key }| {
            let factors = TensorData::new(key.factors(&shape, *p), shape);
            Tensor::<4>::from_data(factors, (&device, DType::F32)).cast(dtype)
        });
        Self {
            scores,
            slope,
            kept,
        }
    }

    /// `exp(scores - lse)`; 0 in rows without keys.
    fn probabilities(&self, lse: &Tensor<3>) -> Tensor<4> {
        (self.scores.clone() - lse.clone().clamp_min(LOWEST).unsqueeze_dim(3)).exp()
    }

    fn dropped(&self, x: Tensor<4>) -> Tensor<4> {
        match &self.kept {
            Some(kept) => x * kept.clone(),
            None => x,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PackedSequences;

    #[test]
    fn blocks_hold_every_pair_that_is_seen() {
        let sequences = PackedSequences::new([[0, 70, 100], [0, 1, 100]])
            .with_keys([[0, 90, 200], [0, 10, 200]])
            .with_offsets([[20, 80], [9, 40]]);
        for options in [
            AttentionOptions::default(),
            AttentionOptions {
                query_offset: 50,
                ..AttentionOptions::causal()
            },
            AttentionOptions {
                window: Some(13),
                ..AttentionOptions::causal()
            },
            AttentionOptions {
                sequences: Some(sequences),
                window: Some(40),
                ..AttentionOptions::causal()
            },
        ] {
            let shape = [2, 100, 200];
            let expected = hidden(shape, &options);
            let mut found = vec![true; expected.len()];
            for Piece {
                rows,
                queries,
                keys,
                options,
            } in blocks(&options, shape)
            {
                let of_block = hidden([1, queries.len(), keys.len()], &options);
                for row in rows {
                    for (i, query) in queries.clone().enumerate() {
                        for (j, key) in keys.clone().enumerate() {
                            found[(row * 100 + query) * 200 + key] = of_block[i * keys.len() + j];
                        }
                    }
                }
            }
            assert!(found == expected, "{options:?}");
        }
    }
}
