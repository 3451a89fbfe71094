//! A bias of scores by the distance of query and key: one line of numbers per head, whose column
//! `key - query + queries - 1` is added to a score.
//!
//! As a matrix of queries by keys, row `i` is the line from column `queries - 1 - i` on: each row is
//! the one above, moved by one. Copies of the line one after another, read in rows that are one
//! number shorter than the line, are moved like that, so no element is looked up by an index.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

/// The columns of a line for `s_q` queries that some of its queries and keys need.
fn columns(s_q: usize, queries: &Range<usize>, keys: &Range<usize>) -> Slice {
    let start = keys.start + s_q - queries.end;
    Slice::from(start..start + queries.len() + keys.len() - 1)
}

/// The part of a line for `s_q` queries that is the line of some of its queries and keys.
pub(super) fn cut<B: Backend>(
    line: FloatTensor<B>,
    s_q: usize,
    queries: &Range<usize>,
    keys: &Range<usize>,
) -> FloatTensor<B> {
    B::float_slice(line, &[Slice::full(), columns(s_q, queries, keys)])
}

/// Adds `part`, the gradient of a [`cut`], to the gradient of the line.
pub(super) fn add<B: Backend>(
    line: FloatTensor<B>,
    s_q: usize,
    queries: &Range<usize>,
    keys: &Range<usize>,
    part: FloatTensor<B>,
) -> FloatTensor<B> {
    let at = [Slice::full(), columns(s_q, queries, keys)];
    let sum = B::float_add(B::float_slice(line.clone(), &at), part);
    B::float_slice_assign(line, &at, sum)
}

/// Adds a line of `[hq, queries + keys - 1]` to scores, `[b, hkv, hq / hkv * queries, keys]`.
pub(super) fn added<B: Backend>(
    scores: FloatTensor<B>,
    line: FloatTensor<B>,
    queries: usize,
) -> FloatTensor<B> {
    let [_, hkv, rows, keys] = scores.shape().dims();
    let heads = line.shape()[0];
    let line_len = queries + keys - 1;
    let matrix = if queries == 1 {
        line
    } else {
        let copies = B::float_reshape(line, Shape::from([heads, 1, line_len]));
        let copies = B::float_expand(copies, Shape::from([heads, queries, line_len]));
        let copies = B::float_reshape(copies, Shape::from([heads, queries * line_len]));
        let first = queries - 1;
        let moved = first..first + queries * (line_len - 1);
        let moved = B::float_slice(copies, &[Slice::full(), Slice::from(moved)]);
        let moved = B::float_reshape(moved, Shape::from([heads, queries, line_len - 1]));
        let of_keys = [Slice::full(), Slice::full(), Slice::from(0..keys)];
        B::float_slice(moved, &of_keys)
    };
    let matrix = B::float_reshape(matrix, Shape::from([1, hkv, rows, keys]));
    B::float_add(scores, matrix)
}

/// The gradient of the line that was [`added`], from that of the scores.
pub(super) fn summed<B: Backend>(dscores: FloatTensor<B>, queries: usize) -> FloatTensor<B> {
    let [_, hkv, rows, keys] = dscores.shape().dims();
    let heads = hkv * rows / queries;
    let line_len = queries + keys - 1;
    let matrix = B::float_sum_dim(dscores, 0);
    if queries == 1 {
        return B::float_reshape(matrix, Shape::from([heads, keys]));
    }
    let matrix = B::float_reshape(matrix, Shape::from([heads, queries, keys]));
    let options = (matrix.device(), matrix.dtype());
    let zeros = |shape: Shape| B::float_zeros(shape, &options.0, options.1.into());
    let beside = zeros(Shape::from([heads, queries, line_len - 1 - keys]));
    let moved = if line_len - 1 == keys {
        matrix
    } else {
        B::float_cat(vec![matrix, beside], 2)
    };
    let moved = B::float_reshape(moved, Shape::from([heads, queries * (line_len - 1)]));
    let before = zeros(Shape::from([heads, queries - 1]));
    let behind = zeros(Shape::from([heads, 1]));
    let copies = B::float_cat(vec![before, moved, behind], 1);
    let copies = B::float_reshape(copies, Shape::from([heads, queries, line_len]));
    let line = B::float_sum_dim(copies, 1);
    B::float_reshape(line, Shape::from([heads, line_len]))
}
