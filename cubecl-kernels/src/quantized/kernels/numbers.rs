use cubecl::prelude::*;

use super::convert::{inverse_of, pack, scale_of};

/// Units of a cube of [`blocks_kernel`]: a plane.
pub(in crate::quantized) const BLOCK_UNITS: u32 = 32;

/// The sizes of a matrix and of its blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::quantized) struct BlockSizes {
    pub(in crate::quantized) rows: u32,
    pub(in crate::quantized) cols: u32,
    /// Elements from one row to the next.
    pub(in crate::quantized) stride: u32,
    pub(in crate::quantized) tall: u32,
    pub(in crate::quantized) wide: u32,
}

/// How the scale of a block follows from its largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BlockScale {
    /// It maps it to the largest number of the format.
    Exact,
    /// The power of two below that.
    PowerOfTwo,
    /// That of microscaling, whose inverse is the power of two above.
    Microscale,
}

/// The numbers that FP8 bytes stand for, times the scale's inverse.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn numbers_kernel(
    values: &[u8],
    scale_inv: &[f32],
    out: &mut [f32],
    #[comptime] e5m2: bool,
) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = number(u32::cast_from(values[ABSOLUTE_POS]), e5m2) * scale_inv[0usize];
    }
}

/// The numbers that the elements of a matrix stand for after each of its blocks was quantised with
/// a scale of its own. A cube has a block.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn blocks_kernel<F: Float>(
    x: &[F],
    out: &mut [f32],
    sizes: BlockSizes,
    largest: f32,
    #[comptime] e5m2: bool,
    #[comptime] rule: BlockScale,
    #[define(F)] _dtype: ElemType,
) {
    let block = block_of_cube(&sizes);
    let amax = block_amax::<F>(x, &block, &sizes);
    let scale = if comptime!(rule == BlockScale::Microscale) {
        microscale_of(amax, largest)
    } else {
        scale_of(amax, largest, comptime!(rule == BlockScale::PowerOfTwo))
    };
    let inverse = inverse_of(amax, scale);
    let mut i = UNIT_POS;
    while i < block.elements {
        let row = (block.first_row + i / block.wide) as usize;
        let col = (block.first_col + i % block.wide) as usize;
        let value = f32::cast_from(x[row * sizes.stride as usize + col]) * scale;
        let code = pack(value, value, value, value, e5m2) & 0xffu32;
        out[row * sizes.cols as usize + col] = number(code, e5m2) * inverse;
        i += comptime!(BLOCK_UNITS);
    }
}

/// A block of a matrix, row by row.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Block {
    pub(super) first_row: u32,
    pub(super) first_col: u32,
    /// Its columns, which are fewer at the right edge of the matrix.
    pub(super) wide: u32,
    pub(super) elements: u32,
}

/// The block that a cube quantises.
#[cube]
pub(super) fn block_of_cube(sizes: &BlockSizes) -> Block {
    let across = sizes.cols.div_ceil(sizes.wide);
    let first_row = CUBE_POS_X / across * sizes.tall;
    let first_col = CUBE_POS_X % across * sizes.wide;
    let wide = min(sizes.wide, sizes.cols - first_col);
    Block {
        first_row,
        first_col,
        wide,
        elements: min(sizes.tall, sizes.rows - first_row) * wide,
    }
}

/// The largest magnitude of a block; NaN if it has a NaN.
#[cube]
pub(super) fn block_amax<F: Float>(x: &[F], block: &Block, sizes: &BlockSizes) -> f32 {
    let mut most = u32::new(0);
    let mut i = UNIT_POS;
    while i < block.elements {
        let row = (block.first_row + i / block.wide) as usize;
        let col = (block.first_col + i % block.wide) as usize;
        let value = f32::cast_from(x[row * sizes.stride as usize + col]);
        most = max(most, u32::reinterpret(value) & 0x7fff_ffffu32);
        i += comptime!(BLOCK_UNITS);
    }
    f32::reinterpret(plane_max(most))
}

/// The number that an FP8 byte stands for.
#[cube]
pub(super) fn number(code: u32, #[comptime] e5m2: bool) -> f32 {
    // The bits of mantissa, the difference to the exponent bias of f32, and the smallest number.
    let mantissa = comptime!(if e5m2 { 2u32 } else { 3u32 });
    let bias = comptime!(if e5m2 { 112u32 } else { 120u32 });
    let smallest = comptime!(if e5m2 {
        1.0f32 / 65536.0
    } else {
        1.0f32 / 512.0
    });
    let magnitude = code & 0x7fu32;
    let shifted = magnitude << comptime!(23u32 - mantissa);
    let mut size = f32::reinterpret(shifted + comptime!(bias << 23u32));
    if magnitude >> mantissa == 0u32 {
        size = f32::cast_from(magnitude) * smallest;
    }
    f32::reinterpret(u32::reinterpret(size) | ((code & 0x80u32) << 24u32))
}

/// The largest power of two with which `amax` does not exceed `largest`; 1 if `amax` is 0.
#[cube]
fn microscale_of(amax: f32, largest: f32) -> f32 {
    let ratio = u32::reinterpret(amax / largest);
    let exponent = (ratio >> 23u32) & 0xffu32;
    let mut up = u32::new(1);
    if ratio & 0x007f_ffffu32 == 0u32 {
        up = u32::new(0);
    }
    // The exponent of the scale is that of the inverse, mirrored at 127.
    let mirrored = exponent + up;
    let mut biased = u32::new(253);
    if mirrored > 1u32 {
        biased = 254u32 - min(mirrored, 253u32);
    }
    let mut scale = f32::reinterpret(biased << 23u32);
    if amax == 0.0 {
        scale = f32::new(1.0);
    }
    scale
}
