//! Which keys a query sees, in a kernel.

use cubecl::prelude::*;

use super::AttentionOptions;

/// See [`AttentionOptions`]; positions are counted from the first key.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Visible {
    /// Position of the first query.
    pub(super) offset: i32,
    /// Keys that a query sees up to its own, its own included.
    pub(super) window: i32,
}

/// What of it is known when a kernel is compiled.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Mask {
    pub(super) causal: bool,
    pub(super) windowed: bool,
}

impl Mask {
    pub(super) fn of(options: &AttentionOptions) -> Self {
        Self { causal: options.causal, windowed: options.window.is_some() }
    }
}

impl Visible {
    pub(super) fn launch_arg(options: &AttentionOptions) -> VisibleLaunch {
        // A window that reaches further than any key is none.
        let window = options.window.unwrap_or(0).min(i32::MAX as usize / 2) as i32;
        VisibleLaunch::new(options.query_offset as i32, window)
    }
}

/// The first key that any of the queries from `first` on sees.
#[cube]
pub(super) fn first_key(visible: &Visible, first: u32, #[comptime] mask: Mask) -> u32 {
    let mut key = 0u32;
    if comptime!(mask.windowed) {
        key = u32::cast_from(max(visible.offset + first as i32 + 1 - visible.window, 0i32));
    }
    key
}

/// The key behind the last that any of the queries before `end` sees.
#[cube]
pub(super) fn end_of_keys(visible: &Visible, end: u32, s_k: u32, #[comptime] mask: Mask) -> u32 {
    let mut key = s_k;
    if comptime!(mask.causal) {
        key = min(u32::cast_from(max(visible.offset + end as i32, 0i32)), s_k);
    }
    key
}

/// Whether query `i` sees key `j`.
#[cube]
pub(super) fn sees(visible: &Visible, i: u32, j: u32, s_k: u32, #[comptime] mask: Mask) -> bool {
    let position = visible.offset + i as i32;
    let mut seen = j < s_k;
    if comptime!(mask.causal) {
        seen = seen && j as i32 <= position;
    }
    if comptime!(mask.windowed) {
        seen = seen && j as i32 > position - visible.window;
    }
    seen
}

/// The first query that sees any of the keys from `first` on.
#[cube]
pub(super) fn first_query(visible: &Visible, first: u32, #[comptime] mask: Mask) -> u32 {
    let mut query = 0u32;
    if comptime!(mask.causal) {
        query = u32::cast_from(max(first as i32 - visible.offset, 0i32));
    }
    query
}

/// The query behind the last that sees any of the keys before `end`.
#[cube]
pub(super) fn end_of_queries(visible: &Visible, end: u32, s_q: u32, #[comptime] mask: Mask) -> u32 {
    let mut query = s_q;
    if comptime!(mask.windowed) {
        let behind = end as i32 - 1 + visible.window - visible.offset;
        query = min(u32::cast_from(max(behind, 0i32)), s_q);
    }
    query
}
