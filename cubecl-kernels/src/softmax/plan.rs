//! Which units process which row, and which scores count.

use cubecl::prelude::*;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Most planes per cube.
pub(super) const MAX_PLANES: usize = 16;
/// Rows per cube if one plane per row is enough.
pub(super) const ROWS: usize = 8;
/// Vectors of 16 bytes that a unit holds in registers.
pub(super) const VECS_PER_THREAD: usize = 4;

/// The dimensions of scores and the strides of the mask, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scores {
    pub(super) rows: u32,
    /// Vectors per row.
    pub(super) vectors: u32,
    pub(super) queries: u32,
    pub(super) heads: u32,
    /// The mask's stride from one sequence to the next; 0 if all sequences share it.
    pub(super) mask_batch: u32,
    /// The mask's stride from one head to the next; 0 if all heads share it.
    pub(super) mask_head: u32,
    pub(super) scale: f32,
}

/// How a kernel distributes rows over units, and which scores are hidden.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct SoftmaxPlan {
    /// Planes per row.
    pub(super) planes: usize,
    /// Whether the units hold a full row in registers.
    pub(super) fits: bool,
    pub(super) causal: bool,
    pub(super) masked: bool,
}

/// The row of this unit's plane.
#[cube]
pub(super) fn row(#[comptime] plan: SoftmaxPlan) -> u32 {
    if comptime!(plan.planes == 1) {
        CUBE_POS_X * comptime!(ROWS as u32) + UNIT_POS_Y
    } else {
        CUBE_POS_X
    }
}

/// The index of this unit among the units of its row.
#[cube]
pub(super) fn unit(#[comptime] plan: SoftmaxPlan) -> u32 {
    if comptime!(plan.planes == 1) {
        UNIT_POS_X
    } else {
        UNIT_POS
    }
}

/// The number of keys that a row's query sees, not counting the mask.
#[cube]
pub(super) fn visible(scores: &Scores, row: u32, lanes: u32, #[comptime] plan: SoftmaxPlan) -> u32 {
    let all = scores.vectors * lanes;
    if comptime!(plan.causal) {
        min(row % scores.queries + 1, all)
    } else {
        all
    }
}
