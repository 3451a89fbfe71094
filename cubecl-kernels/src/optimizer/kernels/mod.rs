//! Optimizer kernels. Each unit processes one vector, 16 bytes of the widest buffer. For many
//! buffers, a table assigns chunks of them to cubes ([`many`]). Arithmetic is in f32. Kernels take the
//! number of vectors as an argument: the length of a buffer argument covers all memory from the
//! start of a view to the end of its allocation.

pub(super) mod adamw;
pub(super) mod fp8_moment;
pub(super) mod gradients;
pub(super) mod lion;
pub(super) mod many;
pub(super) mod remainder;
pub(super) mod sgd;

use cubecl::prelude::*;

/// Units per cube.
pub(super) const UNITS: usize = 256;

#[cube(launch)]
pub(in crate::optimizer) fn copy_kernel<F: Float, N: Size>(
    from: &[Vector<F, N>],
    to: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

/// Returns the total factor of the gradient and whether the step is made. `factor` is read only if
/// `scales` is set; if it is infinite or NaN, the step is skipped.
#[cube]
fn factor_of(grad_factor: f32, factor: &[f32], #[comptime] scales: bool) -> (f32, bool) {
    let mut product = grad_factor;
    let mut goes = true;
    if scales {
        let factor = factor[0];
        // Also false for NaN.
        goes = factor.abs() <= f32::new(f32::MAX);
        product *= factor;
    }
    (product, goes)
}
