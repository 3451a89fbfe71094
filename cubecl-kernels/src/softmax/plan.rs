//! Which units take which row, and what of it counts.

use cubecl::prelude::*;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Planes of the largest cube.
pub(super) const MAX_PLANES: usize = 16;
/// Rows of a cube if a plane is enough for each.
pub(super) const ROWS: usize = 8;
/// Vectors of 16 bytes that a unit holds.
pub(super) const VECS_PER_THREAD: usize = 4;

/// Rows of scores and which of them a mask hides. Distances are in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Scores {
    pub(super) rows: u32,
    /// Vectors of a row.
    pub(super) vectors: u32,
    pub(super) queries: u32,
    pub(super) heads: u32,
    /// In the mask, from a sequence to the next; 0 if they share it.
    pub(super) mask_batch: u32,
    /// In the mask, from a head to the next; 0 if they share it.
    pub(super) mask_head: u32,
    pub(super) scale: f32,
}

/// How a kernel's units are spread over rows, and what is hidden.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct SoftmaxPlan {
    /// Planes of a row.
    pub(super) planes: usize,
    /// Whether the units hold a whole row.
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

/// This unit among those of its row.
#[cube]
pub(super) fn unit(#[comptime] plan: SoftmaxPlan) -> u32 {
    if comptime!(plan.planes == 1) {
        UNIT_POS_X
    } else {
        UNIT_POS
    }
}

/// Keys that a row's query sees, if no mask hides them.
#[cube]
pub(super) fn visible(scores: &Scores, row: u32, lanes: u32, #[comptime] plan: SoftmaxPlan) -> u32 {
    let all = scores.vectors * lanes;
    if comptime!(plan.causal) {
        min(row % scores.queries + 1, all)
    } else {
        all
    }
}
