use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::gemm::{FP8_BLOCK, Fp8Kind, Fp8Matrix, Fp8Scaling};
use megaburn_cuda::tensor;

use super::loads::loads;
use crate::kernel_parts::{RowView, address_type, lanes};
use crate::quantized::kernels::{
    BlockCastVariant, CAST_UNITS, CastSizesLaunch, ScalePitchesLaunch, TILE, block_cast_kernel,
    block_values_kernel,
};

const _: () = assert!(TILE as usize == FP8_BLOCK);

/// How a matrix is cast to FP8 with several scales.
#[derive(Clone, Copy, Debug)]
pub struct BlockCastOptions {
    /// The format.
    pub kind: Fp8Kind,
    /// The magnitude that the largest of a block is mapped to: 448 in e4m3 and 57,344 in e5m2.
    pub largest: f32,
    /// Whether scales are rounded down to powers of two.
    pub power_of_two: bool,
    /// Whether blocks of 128 by 128 share a scale, as in weights. Otherwise 128 neighbours do: of a
    /// row in the matrix, and of a column in its transpose.
    pub square: bool,
    /// Whether the matrix is written as it is.
    pub straight: bool,
    /// Whether its transpose is written.
    pub transposed: bool,
}

/// A matrix `[rows, cols]` in FP8 with several scales.
#[derive(Clone, Debug)]
pub struct BlockCast {
    /// The matrix: `[padded, cols]`, where `padded` is `rows` rounded up to a multiple of 16. The
    /// elements from `rows` on are 0.
    pub straight: Option<Fp8Matrix>,
    /// Its transpose: `[cols, padded]`, where `padded` is `rows` rounded up to a multiple of 128. The
    /// elements from `rows` on are 0.
    pub transposed: Option<Fp8Matrix>,
}

/// Casts a matrix of f32, bf16 or f16 to FP8 in one pass, with scales as in [`cast`](super::cast())
/// for each block.
///
/// # Shapes
/// `x: [rows, cols]` with any strides, but a transposed view is copied first; `cols` is a multiple of
/// 128, and `rows` too if blocks are square. Neither is 0.
pub fn block_cast(x: CubeTensor, options: BlockCastOptions) -> BlockCast {
    let BlockCastOptions {
        kind,
        largest,
        power_of_two,
        square,
        straight,
        transposed,
    } = options;
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let padded_rows = rows.next_multiple_of(16);
    let padded = rows.next_multiple_of(FP8_BLOCK);
    let scaling = if square {
        Fp8Scaling::Blocks
    } else {
        Fp8Scaling::Neighbors
    };
    let empty = |wanted: bool, shape: [usize; 2]| {
        wanted.then(|| Fp8Matrix {
            values: tensor::empty(&x, shape, DType::U8),
            scale_inv: tensor::empty(&x, scaling.shape(shape), DType::F32),
            scaling,
            kind,
        })
    };
    let out = BlockCast {
        straight: empty(straight, [padded_rows, cols]),
        transposed: empty(transposed, [cols, padded]),
    };
    let Some(any) = out.straight.as_ref().or(out.transposed.as_ref()) else {
        return out;
    };
    let x = RowView::of(x);
    let lanes = lanes(x.tensor.dtype, &[cols, x.stride]);
    let (loads, element, size) = loads(x.tensor.dtype, lanes);
    let variant = BlockCastVariant {
        e5m2: kind == Fp8Kind::E5m2,
        power_of_two,
        square,
        straight,
        transposed,
        loads,
    };
    let pitch = |of: &Option<Fp8Matrix>| of.as_ref().map_or(0, |of| of.scale_inv.meta.shape()[1]);
    let pitches = [&out.straight, &out.transposed].map(pitch);
    let [of_straight, of_transposed] = [&out.straight, &out.transposed].map(|of| {
        let of = of.as_ref().unwrap_or(any);
        [of.values.clone(), of.scale_inv.clone()]
    });
    let [down, across] = [rows, cols].map(|len| len.div_ceil(FP8_BLOCK) as u32);
    let [straight, straight_scales] = of_straight;
    let [transposed, transposed_scales] = of_transposed;
    block_cast_kernel::launch(
        &any.values.client,
        CubeCount::Static(across, down, 1),
        CubeDim::new_2d(32, CAST_UNITS / 32),
        address_type(&[&x.tensor, &straight, &transposed]),
        size,
        2,
        x.tensor.clone().into_buffer_arg(),
        straight.into_buffer_arg(),
        straight_scales.into_buffer_arg(),
        transposed.into_buffer_arg(),
        transposed_scales.into_buffer_arg(),
        CastSizesLaunch::new(
            rows as u32,
            cols as u32,
            (x.stride / lanes) as u32,
            padded as u32,
        ),
        ScalePitchesLaunch::new(pitches[0] as u32, pitches[1] as u32, padded_rows as u32),
        largest,
        variant,
        [element, x.tensor.dtype, DType::U32].map(dtype_to_storage_type),
    );
    out
}

/// The numbers that the elements of a matrix with several scales stand for, in f32.
///
/// # Shapes
/// `[rows, k]`, as the matrix
pub(super) fn block_values(x: Fp8Matrix) -> CubeTensor {
    let out = tensor::empty(&x.values, x.values.meta.shape().clone(), DType::F32);
    let elements = out.meta.num_elements();
    if elements > 0 {
        block_values_kernel::launch(
            &out.client,
            CubeCount::Static(elements.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            address_type(&[&x.values, &out]),
            x.values.clone().into_buffer_arg(),
            x.scale_inv.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            x.values.meta.shape()[1],
            x.scale_inv.meta.shape()[1],
            x.scaling == Fp8Scaling::Blocks,
            x.kind == Fp8Kind::E5m2,
        );
    }
    out
}
