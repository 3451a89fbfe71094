//! The kernels. They read their input in its own dtype and compute in f32.

mod amax;
mod block_cast;
mod cast;
mod convert;
mod loads;
mod numbers;
mod nvfp4;
mod sent_weight;
mod transpose;

use cubecl::prelude::*;

pub(super) use amax::{UNITS as AMAX_UNITS, amax_kernel};
pub(super) use block_cast::{ScalePitchesLaunch, block_cast_kernel, block_values_kernel};
pub(super) use cast::{PLACE, SCALES, TILE, TILE_WORDS, UNITS as CAST_UNITS, cast_kernel};
pub(super) use loads::Loads;
pub(crate) use numbers::BlockScale;
pub(super) use numbers::{BLOCK_UNITS, BlockSizesLaunch, blocks_kernel, numbers_kernel};
pub(super) use nvfp4::{DrawnArgLaunch, nvfp4_kernel};
pub(super) use sent_weight::{
    packed_weight_by_four_kernel, packed_weight_kernel, unpacked_weight_by_four_kernel,
    unpacked_weight_kernel,
};
pub(super) use transpose::transpose_kernel;

/// The sizes of a matrix and of its transpose.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct CastSizes {
    pub(super) rows: u32,
    pub(super) cols: u32,
    /// Vectors from one row to the next.
    pub(super) stride: u32,
    /// The bytes of a row of the transpose: a multiple of 16.
    pub(super) padded: u32,
}

/// The compile-time parameters of a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CastVariant {
    /// Whether the format is e5m2 instead of e4m3.
    pub(super) e5m2: bool,
    /// Whether the scale is a power of two.
    pub(super) power_of_two: bool,
    /// Whether the matrix is written as it lies.
    pub(super) straight: bool,
    /// Whether its transpose is written.
    pub(super) transposed: bool,
    /// Whether ranges of rows are matrices of their own.
    pub(super) ranged: bool,
    /// How the matrix is loaded.
    pub(super) loads: Loads,
}

/// The compile-time parameters of a cast with scales of neighbours or of square blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockCastVariant {
    /// Whether the format is e5m2 instead of e4m3.
    pub(super) e5m2: bool,
    /// Whether scales are powers of two.
    pub(super) power_of_two: bool,
    /// Whether blocks of 128 by 128 share a scale, and not 128 neighbours.
    pub(super) square: bool,
    /// Whether the matrix is written as it lies.
    pub(super) straight: bool,
    /// Whether its transpose is written.
    pub(super) transposed: bool,
    /// How the matrix is loaded.
    pub(super) loads: Loads,
}
