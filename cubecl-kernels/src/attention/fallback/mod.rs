//! Attention composed of products and a softmax, one sequence and one block of queries at a time,
//! with its backward.
//!
//! A block skips the keys that none of its queries sees: nearly half of a causal square.

mod block;
mod distances;
pub(super) mod scores;

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Slice};
use megaburn_autograd::backend_ops::{cast, compute_dtype};
use megaburn_autograd::on_composed_backends;

use super::fused::{Fused, FusedGradients, Saved};
use super::options::{AttentionOptions, Piece};
use super::scores::Scores;
use crate::gemm_ops::GemmOps;
use block::{Block, accumulate, by_head, by_position};

on_composed_backends! {
    impl Fused {
        fn fused(
            _: &FloatTensor<Self>,
            _: &FloatTensor<Self>,
            _: &FloatTensor<Self>,
            _: Option<&FloatTensor<Self>>,
            _: &AttentionOptions,
        ) -> Option<Saved<FloatTensor<Self>>> {
            None
        }

        fn fused_gradients(
            _: Saved<FloatTensor<Self>>,
            _: FloatTensor<Self>,
        ) -> FusedGradients<Self> {
            unreachable!("the forward pass saved nothing")
        }
    }
}

/// What is saved for backward.
#[derive(Clone, Debug)]
pub(super) struct FallbackAttention<T> {
    /// `None` if the piece has no query or no key.
    pieces: Vec<(Piece, Option<Attended<T>>)>,
    /// The shapes of `q`, `k` and `v`.
    shapes: [Shape; 3],
    dtypes: [DType; 3],
    /// The dtype of the computation.
    common: FloatDType,
    /// The shape and dtype of the bias, if there is one.
    bias: Option<(Shape, DType)>,
}

/// What is saved of one piece.
#[derive(Clone, Debug)]
struct Attended<T> {
    blocks: Vec<Block<T>>,
    /// `[rows, hkv, keys, d]`.
    k: T,
    /// `[rows, hkv, keys, d_v]`.
    v: T,
}

/// `[s_q, b, hq, d_v]`, from `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`, `v: [s_k, b, hkv, d_v]`
/// and, if there is one, a bias `[hq, s_q + s_k - 1]`.
pub(super) fn forward<B: GemmOps + Scores>(
    [q, k, v]: [FloatTensor<B>; 3],
    bias: Option<FloatTensor<B>>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, FallbackAttention<FloatTensor<B>>) {
    let dtypes = [q.dtype(), k.dtype(), v.dtype()];
    let common = if dtypes.iter().all(|&dtype| dtype == dtypes[0]) {
        dtypes[0].into()
    } else {
        compute_dtype(dtypes[0])
    };
    let [q, k, v] = [q, k, v].map(|x| cast::<B>(x, common));
    let mut shape = q.shape();
    let s_q = shape[0];
    let b = shape[1];
    let s_k = k.shape()[0];
    shape[3] = v.shape()[3];
    let of_bias = bias.as_ref().map(|bias| (bias.shape(), bias.dtype()));
    let bias = bias.map(|bias| cast::<B>(bias, compute_dtype(dtypes[0])));
    let mut outputs = Vec::new();
    let mut pieces = Vec::new();
    for piece in options.pieces(b, s_q, s_k) {
        let mut attended = None;
        if !piece.keys.is_empty() && !piece.queries.is_empty() {
            let own = cut::<B>(q.clone(), &piece.queries, &piece.rows);
            let [k, v] =
                [&k, &v].map(|x| by_head::<B>(cut::<B>(x.clone(), &piece.keys, &piece.rows)));
            let bias = bias
                .clone()
                .map(|bias| distances::cut::<B>(bias, s_q, &piece.queries, &piece.keys));
            let (output, blocks) = attend::<B>(own, [&k, &v], bias, &piece.options);
            outputs.push(BlockPart::new(&piece, &piece.queries, Some(output)));
            attended = Some(Attended { blocks, k, v });
        } else {
            outputs.push(BlockPart::new(&piece, &piece.queries, None));
        }
        pieces.push((piece, attended));
    }
    let y = cast::<B>(joined::<B>(outputs, &shape, &q), dtypes[0].into());
    let shapes = [q.shape(), k.shape(), v.shape()];
    (
        y,
        FallbackAttention {
            pieces,
            shapes,
            dtypes,
            common,
            bias: of_bias,
        },
    )
}

/// Attention of one piece, with the bias of its queries and keys.
fn attend<B: GemmOps + Scores>(
    q: FloatTensor<B>,
    [k, v]: [&FloatTensor<B>; 2],
    bias: Option<FloatTensor<B>>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, Vec<Block<FloatTensor<B>>>) {
    let s_q = q.shape()[0];
    let s_k = k.shape()[2];
    let of_block = |queries: Range<usize>| {
        let bias = bias.clone().map(|bias| {
            let keys = options.visible_to_any(queries.clone(), s_k);
            distances::cut::<B>(bias, s_q, &queries, &keys)
        });
        block::forward::<B>(q.clone(), queries, [k.clone(), v.clone()], bias, options)
    };
    let (outputs, blocks) = options.blocks(s_q).map(of_block).unzip();
    (B::float_cat(outputs, 0), blocks)
}

/// The gradients of `q`, `k` and `v`, and of the bias if there is one, from the gradient of the
/// result, `[s_q, b, hq, d_v]`.
pub(super) fn backward<B: GemmOps + Scores>(
    saved: FallbackAttention<FloatTensor<B>>,
    dy: FloatTensor<B>,
) -> ([FloatTensor<B>; 3], Option<FloatTensor<B>>) {
    let FallbackAttention {
        pieces,
        shapes,
        dtypes,
        common,
        bias,
    } = saved;
    let dy = cast::<B>(dy, common);
    let s_q = dy.shape()[0];
    let wide = compute_dtype(dtypes[0]);
    let mut dbias = bias
        .as_ref()
        .map(|(shape, _)| B::float_zeros(shape.clone(), &dy.device(), wide));
    let mut parts = [const { Vec::new() }; 3];
    for (piece, attended) in pieces {
        let gradients = match attended {
            Some(attended) => {
                let dy = cut::<B>(dy.clone(), &piece.queries, &piece.rows);
                let (found, of_bias) = gradients::<B>(attended, dy, &piece.options);
                let of_bias = of_bias.into_iter();
                dbias = of_bias.fold(dbias, |all, (queries, keys, part)| {
                    let start =
                        |range: Range<usize>, first: usize| range.start + first..range.end + first;
                    let queries = start(queries, piece.queries.start);
                    let keys = start(keys, piece.keys.start);
                    all.map(|all| distances::add::<B>(all, s_q, &queries, &keys, part))
                });
                found.map(Some)
            }
            None => [None, None, None],
        };
        let positions = [&piece.queries, &piece.keys, &piece.keys];
        for ((parts, positions), gradient) in parts.iter_mut().zip(positions).zip(gradients) {
            parts.push(BlockPart::new(&piece, positions, gradient));
        }
    }
    let mut wholes = shapes.into_iter().zip(dtypes);
    let gradients = parts.map(|parts| {
        let (shape, dtype) = wholes.next().expect("there is one entry per gradient");
        cast::<B>(joined::<B>(parts, &shape, &dy), dtype.into())
    });
    let dbias = dbias.zip(bias);
    let dbias = dbias.map(|(sum, (_, dtype))| cast::<B>(sum, dtype.into()));
    (gradients, dbias)
}

/// The queries and keys of a block, counted in their piece, and the block's gradient of the bias.
type BiasPart<T> = (Range<usize>, Range<usize>, T);

/// The gradients of one piece: `[queries, rows, hq, d]`, keys and values in the compute dtype, and
/// those of the bias by block.
fn gradients<B: GemmOps + Scores>(
    attended: Attended<FloatTensor<B>>,
    dy: FloatTensor<B>,
    options: &AttentionOptions,
) -> ([FloatTensor<B>; 3], Vec<BiasPart<FloatTensor<B>>>) {
    let Attended { blocks, k, v } = attended;
    let [_, _, s_k, d] = k.shape().dims();
    let scale = options.factor(d);
    let mut dq = Vec::with_capacity(blocks.len());
    let mut dk = None;
    let mut dv = None;
    let mut dbias = Vec::new();
    // Start with the last block, which sees the most keys: its part is often the full first total.
    for block in blocks.into_iter().rev() {
        let queries = block.queries();
        let part = block::backward::<B>(block, dy.clone(), k.clone(), v.clone(), scale);
        dq.push(part.q);
        let of_bias = part.bias.map(|bias| (queries, part.keys.clone(), bias));
        dbias.extend(of_bias);
        dk = Some(accumulate::<B>(dk, part.k, &part.keys, s_k));
        dv = Some(accumulate::<B>(dv, part.v, &part.keys, s_k));
    }
    dq.reverse();
    let [dk, dv] =
        [dk, dv].map(|sum| by_position::<B>(sum.expect("a chunk has at least one block")));
    ([B::float_cat(dq, 0), dk, dv], dbias)
}

/// A range of positions of a row of the batch, or of several rows from it on; `None` means zeros.
struct BlockPart<T> {
    row: usize,
    positions: Range<usize>,
    content: Option<T>,
}

impl<T> BlockPart<T> {
    fn new(piece: &Piece, positions: &Range<usize>, content: Option<T>) -> Self {
        Self {
            row: piece.rows.start,
            positions: positions.clone(),
            content,
        }
    }
}

/// Slices `positions` and `rows` of `[s, b, ..]`.
fn cut<B: Backend>(
    x: FloatTensor<B>,
    positions: &Range<usize>,
    rows: &Range<usize>,
) -> FloatTensor<B> {
    let shape = x.shape();
    if (positions.len(), rows.len()) == (shape[0], shape[1]) {
        return x;
    }
    B::float_slice(
        x,
        &[Slice::from(positions.clone()), Slice::from(rows.clone())],
    )
}

/// Joins the parts, which are in order, to `[s, b, ..]` of `shape`.
fn joined<B: Backend>(
    parts: Vec<BlockPart<FloatTensor<B>>>,
    shape: &Shape,
    like: &FloatTensor<B>,
) -> FloatTensor<B> {
    let dtype = parts
        .iter()
        .find_map(|part| part.content.as_ref())
        .unwrap_or(like)
        .dtype();
    let mut rows: Vec<Vec<FloatTensor<B>>> = Vec::new();
    for BlockPart {
        row,
        positions,
        content,
    } in parts
    {
        rows.resize_with(row + 1, Vec::new);
        if !positions.is_empty() {
            let zeros = || {
                let mut shape = shape.clone();
                shape[0] = positions.len();
                shape[1] = 1;
                B::float_zeros(shape, &like.device(), dtype.into())
            };
            rows[row].push(content.unwrap_or_else(zeros));
        }
    }
    B::float_cat(
        rows.into_iter().map(|row| B::float_cat(row, 0)).collect(),
        1,
    )
}
