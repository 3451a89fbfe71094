use cubecl::prelude::*;

use super::convert::pack;
use super::numbers::{BLOCK_UNITS, BlockSizes, block_amax, block_of_cube, number};
use crate::kernel_parts::{RandomStream, random_bits, unit};

/// Where a matrix's random numbers are in their stream. Ranges of consecutive rows (or columns) of the
/// whole matrix begin at `row_firsts` in this one and at `row_starts` in the whole.
#[derive(CubeType, CubeLaunch)]
pub(in crate::quantized) struct DrawnArg {
    pub(in crate::quantized) random: RandomStream,
    pub(in crate::quantized) first: u64,
    pub(in crate::quantized) width: u64,
    pub(in crate::quantized) row_firsts: Sequence<u32>,
    pub(in crate::quantized) row_starts: Sequence<u32>,
    pub(in crate::quantized) col_firsts: Sequence<u32>,
    pub(in crate::quantized) col_starts: Sequence<u32>,
}

/// The largest number of E2M1, and its product with that of E4M3.
const LARGEST: f32 = 6.0;
const LARGEST_PRODUCT: f32 = 6.0 * 448.0;
/// The largest scale of a whole matrix, `2^116`.
const MAX_MATRIX_SCALE: f32 = 8.307_675e34;

const _: () = assert!(MAX_MATRIX_SCALE.to_bits() == (116 + 127) << 23);

/// The numbers that the elements of a matrix stand for in NVFP4. A cube has a block, and `amax[at]` is
/// the largest magnitude of the matrix.
#[cube(launch, address_type = "dynamic")]
pub(in crate::quantized) fn nvfp4_kernel<F: Float>(
    x: &[F],
    amax: &[f32],
    out: &mut [f32],
    drawn: &DrawnArg,
    sizes: BlockSizes,
    at: u32,
    #[comptime] stochastic: bool,
    #[define(F)] _dtype: ElemType,
) {
    let block = block_of_cube(&sizes);
    let of_block = block_amax::<F>(x, &block, &sizes);
    let of_matrix = amax[at as usize];
    let mut matrix = LARGEST_PRODUCT / of_matrix;
    if of_matrix == 0.0 {
        matrix = f32::new(1.0);
    }
    if matrix > MAX_MATRIX_SCALE {
        matrix = f32::new(MAX_MATRIX_SCALE);
    }
    let wanted = of_block / LARGEST * matrix;
    let stored = number(pack(wanted, wanted, wanted, wanted, false) & 0xffu32, false);
    let mut inverse = stored * (1.0 / matrix);
    let mut scale = 1.0 / inverse;
    if stored == 0.0 {
        scale = f32::new(0.0);
    }
    if u32::reinterpret(of_matrix) >= 0x7f80_0000u32 {
        scale = f32::new(1.0);
        inverse = f32::reinterpret(u32::new(0x7fc0_0000));
    }
    let mut i = UNIT_POS;
    while i < block.elements {
        let row = block.first_row + i / block.wide;
        let col = block.first_col + i % block.wide;
        let value = f32::cast_from(x[row as usize * sizes.stride as usize + col as usize]);
        let rounded = if comptime!(stochastic) {
            rounded(value * scale, uniform(drawn, row, col), stochastic)
        } else {
            rounded(value * scale, 0.0, stochastic)
        };
        out[row as usize * sizes.cols as usize + col as usize] = rounded * inverse;
        i += comptime!(BLOCK_UNITS);
    }
}

/// The number in `[0, 1)` that an element is rounded with.
#[cube]
fn uniform(drawn: &DrawnArg, row: u32, col: u32) -> f32 {
    let row = position(row, &drawn.row_firsts, &drawn.row_starts);
    let col = position(col, &drawn.col_firsts, &drawn.col_starts);
    let index = drawn.first + row as u64 * drawn.width + col as u64;
    let block = index / 4u64;
    let lane = index % 4u64;
    let (a, b, c, d) = random_bits(&drawn.random, block as u32, (block >> 32u64) as u32);
    let mut bits = select(lane == 0u64, a, b);
    bits = select(lane == 2u64, c, bits);
    bits = select(lane == 3u64, d, bits);
    unit(bits)
}

/// The position in the whole matrix of a row or column.
#[cube]
fn position(at: u32, firsts: &Sequence<u32>, starts: &Sequence<u32>) -> u32 {
    let mut found = at;
    #[unroll]
    for i in 0..firsts.len() {
        if at >= firsts[i] {
            found = starts[i] + (at - firsts[i]);
        }
    }
    found
}

/// The number of E2M1 that `x` is rounded to: the nearest, of two the even one, or stochastically the
/// one further from zero if `uniform` is below the share of the distance to it.
#[cube]
fn rounded(x: f32, uniform: f32, #[comptime] stochastic: bool) -> f32 {
    let bits = u32::reinterpret(x);
    let magnitude = f32::reinterpret(bits & 0x7fff_ffffu32);
    let mut step = f32::new(0.5);
    if magnitude >= 2.0 {
        step = f32::new(1.0);
    }
    if magnitude >= 4.0 {
        step = f32::new(2.0);
    }
    let steps = magnitude / step;
    let below = steps.floor();
    let rest = steps - below;
    let mut threshold = uniform;
    if comptime!(!stochastic) {
        // Above one half, or at it if the number below is odd.
        threshold = f32::new(0.5);
        if u32::cast_from(below) & 1u32 == 1u32 {
            threshold = f32::new(0.499_999_97);
        }
    }
    let mut size = below * step;
    if rest > threshold {
        size = (below + 1.0) * step;
    }
    size = min(size, f32::new(LARGEST));
    f32::reinterpret(u32::reinterpret(size) | (bits & 0x8000_0000u32))
}
