//! Dropout kernels. Each unit generates the mask of a vector from the vector's position in the
//! global tensor.

use cubecl::prelude::*;

use crate::kernel_parts::{RandomStream, random_bits, unit};

/// A mask and the positions of the shard's rows in the global tensor.
#[derive(CubeType, CubeLaunch)]
pub(super) struct MaskArg {
    pub(super) random: RandomStream,
    /// The global index of the first row's first element.
    pub(super) first: u64,
    /// Sizes of the row dimensions, from the innermost outwards, without the outermost.
    pub(super) sizes: Sequence<u32>,
    /// Distances of neighboring indices in each of these dimensions.
    pub(super) strides: Sequence<u64>,
    /// The distance of neighboring indices in the outermost dimension.
    pub(super) outer: u64,
    pub(super) p: f32,
    /// The factor of elements that are kept, `1 / (1 - p)`.
    pub(super) kept: f32,
}

/// Which steps the kernel performs; fixed at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Steps {
    pub(super) dropped: bool,
    pub(super) biased: bool,
    pub(super) added: bool,
}

/// The mask factors of the vector that begins at element `column` of `row`.
///
/// A vector either has one element, or a multiple of four that is aligned to the blocks of four
/// random numbers.
#[cube]
fn factors<N: Size>(mask: &MaskArg, row: usize, column: usize) -> Vector<f32, N> {
    let mut index = mask.first + column as u64;
    let mut rest = row;
    #[unroll]
    for dim in 0..mask.sizes.len() {
        let size = mask.sizes[dim] as usize;
        index += (rest % size) as u64 * mask.strides[dim];
        rest /= size;
    }
    index += rest as u64 * mask.outer;
    let lanes = N::value();
    let mut factors = Vector::<f32, N>::new(0.0);
    if comptime!(lanes >= 4) {
        #[unroll]
        for four in 0..comptime!(lanes / 4) {
            let block = index / 4u64 + four as u64;
            let (a, b, c, d) = random_bits(&mask.random, block as u32, (block >> 32u64) as u32);
            factors.insert(comptime!(4 * four), factor(mask, a));
            factors.insert(comptime!(4 * four + 1), factor(mask, b));
            factors.insert(comptime!(4 * four + 2), factor(mask, c));
            factors.insert(comptime!(4 * four + 3), factor(mask, d));
        }
    } else {
        let block = index / 4u64;
        let lane = index % 4u64;
        let (a, b, c, d) = random_bits(&mask.random, block as u32, (block >> 32u64) as u32);
        let mut bits = select(lane == 0u64, a, b);
        bits = select(lane == 2u64, c, bits);
        bits = select(lane == 3u64, d, bits);
        factors = Vector::new(factor(mask, bits));
    }
    factors
}

#[cube]
fn factor(mask: &MaskArg, bits: u32) -> f32 {
    select(unit(bits) < mask.p, f32::new(0.0), mask.kept)
}

/// Computes `residual + mask * (x + bias)`; a row has `width` vectors.
#[cube(launch, address_type = "dynamic")]
pub(super) fn forward_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<G, N>],
    residual: &[Vector<F, N>],
    y: &mut [Vector<F, N>],
    mask: &MaskArg,
    vectors: usize,
    width: u32,
    x_stride: u32,
    residual_stride: u32,
    #[comptime] steps: Steps,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let row = ABSOLUTE_POS / width as usize;
        let column = ABSOLUTE_POS % width as usize;
        let mut value = Vector::<f32, N>::cast_from(x[row * x_stride as usize + column]);
        if comptime!(steps.biased) {
            value += Vector::cast_from(bias[column]);
        }
        if comptime!(steps.dropped) {
            value *= factors(mask, row, column * N::value());
        }
        if comptime!(steps.added) {
            value += Vector::cast_from(residual[row * residual_stride as usize + column]);
        }
        y[ABSOLUTE_POS] = Vector::cast_from(value);
    }
}

/// Computes the gradient of `x` where there is a bias. Each unit processes one column of every
/// `parts`-th row and writes the sum as its partial bias gradient. If nothing is dropped, `dx`
/// equals `dy` and is not written.
#[cube(launch, address_type = "dynamic")]
pub(super) fn biased_backward_kernel<F: Float, N: Size>(
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    dbias: &mut [Vector<f32, N>],
    mask: &MaskArg,
    rows: u32,
    width: u32,
    stride: u32,
    parts: u32,
    #[comptime] dropped: bool,
    #[comptime] ahead: u32,
    #[define(F)] _dtype: ElemType,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if column < width {
        let column = column as usize;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut row = CUBE_POS_Y;
        while row < rows {
            // Issue the loads of several rows together to hide memory latency.
            let mut outputs = Array::<Vector<F, N>>::new(comptime!(ahead as usize));
            #[unroll]
            for i in 0..ahead {
                let row = row + i * parts;
                if row < rows {
                    outputs[i as usize] = dy[row as usize * stride as usize + column];
                }
            }
            #[unroll]
            for i in 0..ahead {
                let row = row + i * parts;
                if row < rows {
                    let row = row as usize;
                    let mut value = Vector::<f32, N>::cast_from(outputs[i as usize]);
                    if comptime!(dropped) {
                        value *= factors(mask, row, column * N::value());
                        dx[row * width as usize + column] = Vector::cast_from(value);
                    }
                    sum += value;
                }
            }
            row += parts * ahead;
        }
        dbias[CUBE_POS_Y as usize * width as usize + column] = sum;
    }
}
