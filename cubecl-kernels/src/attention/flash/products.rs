//! The products that the kernels are made of, by the instructions that the GPU has for them.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::tile::{self, Pair, wait_for_copies};
use super::wgmma;

/// Whose instructions multiply.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) enum MmaKind {
    /// A plane's, `mma.sync`, for 16 rows at a time.
    OfPlane,
    /// Those of four planes together, `wgmma`, for 64 rows of this dtype.
    OfFourPlanes(&'static str),
}

impl MmaKind {
    /// These if a cube of `planes` can have them.
    pub(super) fn of_planes(self, planes: usize) -> Self {
        if planes.is_multiple_of(wgmma::PLANES) {
            self
        } else {
            Self::OfPlane
        }
    }
}

/// The tiles that this unit has asked for are there, those of all units, for whoever multiplies them.
#[cube]
pub(super) fn meet(#[comptime] products: MmaKind) {
    wait_for_copies();
    if comptime!(products != MmaKind::OfPlane) {
        wgmma::show_to_tensor_cores();
    }
    sync_cube();
}

/// Waits until all but the last `pending` products that were begun are done; `result`, of `count` pairs,
/// is one that is done then. Until this is called nothing may read it, nor write what it reads.
#[cube]
pub(super) fn settle(
    result: &mut Array<Pair<f32>>,
    #[comptime] count: usize,
    #[comptime] pending: usize,
    #[comptime] products: MmaKind,
) {
    if comptime!(products != MmaKind::OfPlane && count > 0) {
        wgmma::settle(result, count, pending);
    }
}

/// Begins the products of this plane's rows of the tile at `at_left`, `stretches` times 16, with all `columns`
/// rows of the tile at `at_right`, both rows of `d`; the left tile has `left_rows`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "a product has two operands and a shape"
)]
pub(super) fn multiply_rows<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tiles: &Shared<[F]>,
    at_left: usize,
    at_right: usize,
    #[comptime] left_rows: usize,
    #[comptime] stretches: usize,
    #[comptime] columns: usize,
    #[comptime] d: usize,
    #[comptime] products: MmaKind,
) -> Array<Pair<f32>> {
    match comptime!(products) {
        MmaKind::OfFourPlanes(dtype) => {
            wgmma::multiply_rows::<F>(tiles, at_left, at_right, left_rows, columns, d, dtype)
        }
        MmaKind::OfPlane => {
            let row = UNIT_POS_Y * comptime!(16 * stretches as u32);
            tile::multiply_rows::<F>(
                mma, tiles, at_left, row, at_right, left_rows, stretches, columns, d,
            )
        }
    }
}

/// Begins to add to `sums` the products of `weights`, `rows` of them in a row, with the columns of the tile of
/// `rows` rows of `d` at `at_right`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "a product has two operands and a shape"
)]
pub(super) fn add_columns<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    weights: &Array<Pair<f32>>,
    tiles: &Shared<[F]>,
    at_right: usize,
    sums: &mut Array<Pair<f32>>,
    #[comptime] stretches: usize,
    #[comptime] rows: usize,
    #[comptime] d: usize,
    #[comptime] products: MmaKind,
) {
    match comptime!(products) {
        MmaKind::OfFourPlanes(dtype) => {
            wgmma::add_columns::<F>(weights, tiles, at_right, sums, rows, d, dtype)
        }
        MmaKind::OfPlane => {
            tile::add_columns::<F>(mma, weights, tiles, at_right, sums, stretches, rows, d)
        }
    }
}
