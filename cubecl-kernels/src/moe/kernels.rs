//! What the kernels over experts share, and their layout: each plane processes one token, and
//! expert `32 i + lane` is in register `i` of that lane.

use cubecl::prelude::*;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Tokens per cube.
pub(super) const TOKENS: usize = 8;
/// The most experts: a lane holds 16.
pub(super) const MOST_EXPERTS: usize = 512;
/// [`TINY`](super::router::TINY) in f32, for kernels.
pub(super) const TINY: f32 = super::router::TINY as f32;

/// The index of the lane's `i`th expert.
#[cube]
pub(super) fn number(#[comptime] i: usize) -> u32 {
    UNIT_POS_X + comptime!((i * PLANE) as u32)
}
