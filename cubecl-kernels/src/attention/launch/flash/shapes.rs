//! The sizes of a cube's tiles: what fits into a unit's registers, and what was measured to be
//! fast.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use crate::attention::kernels::flash::visible::Mask;
use crate::attention::kernels::flash::{Backward, Dropped, Forward, MmaKind, row_len, wgmma};
use crate::attention::options::{AttentionOptions, AttentionTiles};
use crate::kernel_parts::tensor_cores::is_hopper;

/// The instructions that the GPU of `x` multiplies by: `wgmma`, which only Hopper has, or
/// `mma.sync`.
pub(super) fn products_of(x: &CubeTensor, options: &AttentionOptions) -> MmaKind {
    match x.dtype {
        _ if !is_hopper(x) || options.tiles.mma => MmaKind::OfPlane,
        DType::F16 => MmaKind::OfFourPlanes("f16"),
        _ => MmaKind::OfFourPlanes("bf16"),
    }
}

pub(super) fn forward_shape(
    d: usize,
    d_v: usize,
    options: &AttentionOptions,
    biased: bool,
    products: MmaKind,
) -> Forward {
    let [planes, row_blocks, keys] = options.tiles.forward.unwrap_or(match products {
        MmaKind::OfFourPlanes(_) if d.max(d_v) <= 128 => [8, 1, 128],
        MmaKind::OfFourPlanes(_) => [8, 1, 64],
        // Two pairs of tiles fit into 99 KB, which every GPU since Ampere has.
        MmaKind::OfPlane if row_len(d) + row_len(d_v) <= 256 => [4, 1, 64],
        MmaKind::OfPlane => [4, 1, 32],
    });
    let products = if row_blocks == 1 {
        products.of_planes(planes)
    } else {
        MmaKind::OfPlane
    };
    Forward {
        d,
        d_v,
        planes,
        row_blocks,
        keys,
        mask: Mask::of(options),
        capped: options.soft_cap.is_some(),
        biased,
        dropped: Dropped::of(options),
        products,
    }
}

/// The kernels of backward: one for queries, then one or two for keys and values.
pub(super) fn backward_shapes(
    d: usize,
    d_v: usize,
    options: &AttentionOptions,
    biased: bool,
    products: MmaKind,
) -> Vec<Backward> {
    let shape = |[planes, tile]: [usize; 2], of_keys, of_values| Backward {
        d,
        d_v,
        planes,
        tile,
        mask: Mask::of(options),
        capped: options.soft_cap.is_some(),
        biased,
        dropped: Dropped::of(options),
        of_keys,
        of_values,
        products: products.of_planes(planes),
    };
    let AttentionTiles { queries, keys, .. } = options.tiles;
    let planes = if products == MmaKind::OfPlane {
        4
    } else {
        2 * wgmma::PLANES
    };
    // A cube's own rows and two pairs of tiles are in shared memory; a multiprocessor of Hopper has
    // 227 KB.
    let padded = row_len(d) + row_len(d_v);
    let (room, of_queries) = match products {
        MmaKind::OfPlane => (64, 64),
        _ if padded <= 256 => (64, 128),
        _ if padded <= 448 => (64, 64),
        _ => (32, 32),
    };
    let mut shapes = vec![shape(queries.unwrap_or([planes, of_queries]), false, false)];
    // Sums and scores are in registers, at most 255 per unit: half of `d + d_v`, plus a tile's
    // rows.
    let of_keys = |tile: usize| keys.unwrap_or([planes, tile.min(room)]);
    let halves = (d + d_v) / 2;
    shapes.extend(match products {
        _ if halves <= 128 => vec![shape(of_keys(64), true, true)],
        MmaKind::OfPlane if halves <= 160 => vec![shape(of_keys(32), true, true)],
        MmaKind::OfPlane => vec![
            shape(of_keys(32), true, false),
            shape(of_keys(32), false, true),
        ],
        _ => vec![
            shape(of_keys(64), true, false),
            shape(of_keys(64), false, true),
        ],
    });
    shapes
}

/// The kernel of the bias: two stages of all four tiles are in shared memory.
pub(super) fn bias_shape(
    d: usize,
    d_v: usize,
    options: &AttentionOptions,
    products: MmaKind,
) -> Backward {
    let padded = row_len(d) + row_len(d_v);
    let (planes, tile) = match products {
        MmaKind::OfFourPlanes(_) if padded <= 256 => (wgmma::PLANES, 64),
        // Two stages fit into 99 KB, which every GPU since Ampere has.
        MmaKind::OfPlane if padded <= 128 => (4, 64),
        _ if padded <= 256 => (4, 32),
        MmaKind::OfFourPlanes(_) => (wgmma::PLANES, 32),
        MmaKind::OfPlane => (2, 16),
    };
    Backward {
        d,
        d_v,
        planes,
        tile,
        mask: Mask::of(options),
        capped: options.soft_cap.is_some(),
        biased: true,
        dropped: Dropped::of(options),
        of_keys: false,
        of_values: false,
        products: products.of_planes(planes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_every_size_fit_hoppers_shared_memory() {
        let options = AttentionOptions::causal();
        let sizes = || (8..=256).step_by(8);
        for (d, d_v) in sizes().flat_map(|d| sizes().map(move |d_v| (d, d_v))) {
            for products in [MmaKind::OfFourPlanes("bf16"), MmaKind::OfPlane] {
                let bytes = super::super::shared_bytes(d, d_v, &options, true, products);
                assert!(bytes <= 227 * 1024, "{d} {d_v} {products:?}: {bytes}");
            }
        }
    }
}
