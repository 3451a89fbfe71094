//! How kernels over experts are laid out: a plane has a token, and expert `32 i + lane` is the lane's `i`th, in
//! its registers.

use cubecl::prelude::*;

/// Units of a plane.
pub(super) const PLANE: usize = 32;
/// Tokens of a cube.
pub(super) const TOKENS: usize = 8;
/// The most experts: a lane holds 16.
pub(super) const MOST_EXPERTS: usize = 512;
/// [`TINY`](super::router::TINY), as kernels have it.
pub(super) const TINY: f32 = super::router::TINY as f32;

/// The number of the lane's `i`th expert.
#[cube]
pub(super) fn number(#[comptime] i: usize) -> u32 {
    UNIT_POS_X + comptime!((i * PLANE) as u32)
}

/// The cubes that so many tokens take.
pub(super) fn cubes(tokens: usize) -> CubeCount {
    CubeCount::Static(tokens.div_ceil(TOKENS) as u32, 1, 1)
}
