//! The matrix products of the kernels, by the fastest instructions of the GPU.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::tile::{self, Pair, wait_for_copies};
use super::wgmma;

/// Which instructions multiply.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::attention) enum MmaKind {
    /// `mma.sync` by one plane, for 16 rows at a time.
    OfPlane,
    /// `wgmma` by four planes together, for 64 rows of the given dtype.
    OfFourPlanes(&'static str),
}

impl MmaKind {
    /// These instructions if a cube of `planes` planes supports them, `mma.sync` otherwise.
    pub(in crate::attention) fn of_planes(self, planes: usize) -> Self {
        if planes.is_multiple_of(wgmma::PLANES) {
            self
        } else {
            Self::OfPlane
        }
    }
}

/// Waits until the tiles that all units have started to copy are visible to whatever multiplies
/// them.
#[cube]
pub(super) fn meet(#[comptime] products: MmaKind) {
    wait_for_copies();
    if comptime!(products != MmaKind::OfPlane) {
        wgmma::show_to_tensor_cores();
    }
    sync_cube();
}

/// Waits until all products except the last `pending` that were started are done; `result`, of
/// `count` pairs, must be among the finished ones. Before this call `result` must not be read, and
/// its operands must not be written.
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

/// Starts the products of this plane's rows of the tile at `at_left` (`row_blocks` row blocks of 16)
/// with all `columns` rows of the tile at `at_right`. The rows of both have `d` elements; the left
/// tile has `left_rows` rows.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
pub(super) fn multiply_rows<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    tiles: &Shared<[F]>,
    at_left: usize,
    at_right: usize,
    #[comptime] left_rows: usize,
    #[comptime] row_blocks: usize,
    #[comptime] columns: usize,
    #[comptime] d: usize,
    #[comptime] products: MmaKind,
) -> Array<Pair<f32>> {
    match comptime!(products) {
        MmaKind::OfFourPlanes(dtype) => {
            wgmma::multiply_rows::<F>(tiles, at_left, at_right, left_rows, columns, d, dtype)
        }
        MmaKind::OfPlane => {
            let row = UNIT_POS_Y * comptime!(16 * row_blocks as u32);
            tile::multiply_rows::<F>(
                mma, tiles, at_left, row, at_right, left_rows, row_blocks, columns, d,
            )
        }
    }
}

/// Starts to add to `sums` the products of `weights`, which have `rows` columns, with the tile of
/// `rows` rows of `d` elements at `at_right`.
#[cube]
#[allow(
    clippy::too_many_arguments,
    reason = "two operands and the product's shape"
)]
pub(super) fn add_columns<F: Float>(
    mma: &MmaDefinition<F, F, f32>,
    weights: &Array<Pair<f32>>,
    tiles: &Shared<[F]>,
    at_right: usize,
    sums: &mut Array<Pair<f32>>,
    #[comptime] row_blocks: usize,
    #[comptime] rows: usize,
    #[comptime] d: usize,
    #[comptime] products: MmaKind,
) {
    match comptime!(products) {
        MmaKind::OfFourPlanes(dtype) => {
            wgmma::add_columns::<F>(weights, tiles, at_right, sums, rows, d, dtype)
        }
        MmaKind::OfPlane => {
            tile::add_columns::<F>(mma, weights, tiles, at_right, sums, row_blocks, rows, d)
        }
    }
}
