//! In a kernel: which keys a query sees, and which queries see a key.

use cubecl::prelude::*;

use super::tile::Pair;

/// The mask of [`AttentionOptions`](crate::AttentionOptions). Positions count from the first key of a
/// query's sequence.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Visible {
    /// Position of a sequence's first query.
    pub(in crate::attention) offset: i32,
    /// Number of keys that a query sees up to its own position, inclusive.
    pub(in crate::attention) window: i32,
}

/// The kind of mask; a compile-time constant of a kernel.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) struct Mask {
    pub(in crate::attention) causal: bool,
    pub(in crate::attention) windowed: bool,
    /// Whether rows contain packed sequences, whose bounds are given.
    pub(in crate::attention) packed: bool,
}

impl Mask {
    /// Whether a span may start after the first position.
    fn begins(self, of: Side) -> bool {
        let moving = match of {
            Side::Keys => self.windowed,
            Side::Queries => self.causal,
        };
        moving || self.packed
    }
}

/// What a span consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::attention) enum Side {
    Keys,
    Queries,
}

/// Positions from `begin` up to `end`. Both are non-decreasing over the rows of a tensor.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    pub(super) begin: i32,
    pub(super) end: i32,
}

/// The range of the `s_k` keys that query `i` of `s_q` sees. `bounds` are only read with packed
/// sequences. At `3 * (batch * s_q + i)` they have, for query `i` of row `batch`: its first key,
/// the end of its keys, and what is added to `i` for its position among the keys.
#[cube]
pub(super) fn keys_of(
    visible: &Visible,
    bounds: &[i32],
    batch: u32,
    i: u32,
    s_q: u32,
    s_k: u32,
    #[comptime] mask: Mask,
) -> Span {
    let mut first = 0i32;
    let mut last = s_k as i32;
    let mut position = visible.offset + i as i32;
    if comptime!(mask.packed) {
        let at = (batch * s_q + min(i, s_q - 1)) as usize * 3;
        first = bounds[at];
        last = bounds[at + 1];
        position += bounds[at + 2];
    }
    let mut begin = first;
    if comptime!(mask.windowed) {
        begin = min(max(first, position + 1 - visible.window), last);
    }
    let mut end = last;
    if comptime!(mask.causal) {
        end = max(begin, min(last, position + 1));
    }
    Span { begin, end }
}

/// The range of the `s_q` queries that see key `j` of `s_k`; `bounds` are those of the keys.
#[cube]
pub(super) fn queries_of(
    visible: &Visible,
    bounds: &[i32],
    batch: u32,
    j: u32,
    s_q: u32,
    s_k: u32,
    #[comptime] mask: Mask,
) -> Span {
    let mut first = 0i32;
    let mut last = s_q as i32;
    let mut position = j as i32 - visible.offset;
    if comptime!(mask.packed) {
        let at = (batch * s_k + min(j, s_k - 1)) as usize * 3;
        first = bounds[at];
        last = bounds[at + 1];
        position += bounds[at + 2];
    }
    let mut begin = first;
    if comptime!(mask.causal) {
        begin = min(max(first, position), last);
    }
    let mut end = last;
    if comptime!(mask.windowed) {
        end = max(begin, min(last, position + visible.window));
    }
    Span { begin, end }
}

/// Whether position `at` is in the span.
#[cube]
pub(super) fn within(span: &Span, at: u32, #[comptime] mask: Mask, #[comptime] of: Side) -> bool {
    let mut inside = (at as i32) < span.end;
    if comptime!(mask.begins(of)) {
        inside = inside && at as i32 >= span.begin;
    }
    inside
}

/// Sets scores of a lane's two rows, one eight below the other, to minus infinity where the column,
/// counted from `first`, is outside of the row's span.
#[cube]
pub(super) fn hide(
    scores: &mut Array<Pair<f32>>,
    span: &Span,
    below: &Span,
    first: u32,
    #[comptime] count: usize,
    #[comptime] mask: Mask,
    #[comptime] of: Side,
) {
    #[unroll]
    for at in 0..count {
        let span = comptime![if at % 2 == 0 { span } else { below }];
        let mut pair = scores[at];
        #[unroll]
        for side in 0..2usize {
            let column = first + comptime!((at / 2 * 8 + side) as u32) + UNIT_POS_X % 4 * 2;
            if !within(span, column, mask, of) {
                pair.insert(side, f32::new(f32::NEG_INFINITY));
            }
        }
        scores[at] = pair;
    }
}
