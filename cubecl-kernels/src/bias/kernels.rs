//! Kernels for sums over rows: each column of vectors has several units, each sums some of the
//! rows, and a tree reduction adds their partial sums.

use cubecl::prelude::*;

/// Rows that a unit loads at once, to hide memory latency.
pub(super) const AHEAD: u32 = 8;

/// The compile-time parameters of a sum over rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CubeShape {
    /// Columns of vectors per cube; a power of two.
    pub(super) columns: u32,
    /// Units per column, which sum different rows; a power of two.
    pub(super) workers: u32,
    /// Whether the sum is added to the output instead of written.
    pub(super) add: bool,
}

/// Sums the rows of `x`; each group has `rows` of them.
///
/// Cubes along X take different groups, along Y different columns, and each of the `parts` cubes
/// along Z sums different rows of a group. Either the group count or `parts` is 1.
#[cube(launch, address_type = "dynamic")]
pub(super) fn column_sum_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Vector<G, N>],
    rows: u32,
    width: u32,
    stride: u32,
    parts: u32,
    #[comptime] shape: CubeShape,
    #[comptime] ahead: u32,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let units = comptime!((shape.columns * shape.workers) as usize);
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(units);
    let column = CUBE_POS_Y * comptime!(shape.columns) + UNIT_POS_X;
    let mut sum = Vector::<f32, N>::new(0.0);
    if column < width {
        let first = CUBE_POS_X as usize * rows as usize;
        let step = parts * comptime!(shape.workers);
        let mut row = CUBE_POS_Z * comptime!(shape.workers) + UNIT_POS_Y;
        while row < rows {
            let mut loaded = Array::<Vector<F, N>>::new(comptime!(ahead as usize));
            #[unroll]
            for i in 0..ahead {
                let row = row + i * step;
                if row < rows {
                    let at = (first + row as usize) * stride as usize + column as usize;
                    loaded[i as usize] = x[at];
                }
            }
            #[unroll]
            for i in 0..ahead {
                if row + i * step < rows {
                    sum += Vector::<f32, N>::cast_from(loaded[i as usize]);
                }
            }
            row += step * ahead;
        }
    }
    shared[UNIT_POS as usize] = sum;
    #[unroll]
    for level in 0..comptime!(shape.workers.ilog2()) {
        let half = comptime!(shape.workers >> (level + 1));
        sync_cube();
        if UNIT_POS_Y < half {
            let other = UNIT_POS + comptime!(half * shape.columns);
            let term = shared[other as usize];
            shared[UNIT_POS as usize] += term;
        }
    }
    if UNIT_POS_Y == 0 && column < width {
        let sum = shared[UNIT_POS as usize];
        let to = (CUBE_POS_X + CUBE_POS_Z) as usize * width as usize + column as usize;
        if comptime!(shape.add) {
            out[to] += Vector::cast_from(sum);
        } else {
            out[to] = Vector::cast_from(sum);
        }
    }
}

/// Adds the row of the addend that belongs to the group to `x`; one vector per unit.
#[cube(launch, address_type = "dynamic")]
pub(super) fn add_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    addend: &[Vector<G, N>],
    y: &mut [Vector<F, N>],
    vectors: usize,
    rows: u32,
    width: u32,
    stride: u32,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < vectors {
        let row = ABSOLUTE_POS / width as usize;
        let column = ABSOLUTE_POS % width as usize;
        let group = row / rows as usize;
        let mut value = Vector::<f32, N>::cast_from(x[row * stride as usize + column]);
        value += Vector::cast_from(addend[group * width as usize + column]);
        y[ABSOLUTE_POS] = Vector::cast_from(value);
    }
}
