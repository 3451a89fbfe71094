use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::gemm::{Fp8Kind, Fp8Matrix};
use megaburn_cuda::tensor;

use crate::kernel_parts::{RowView, address_type};
use crate::quantized::kernels::{
    BLOCK_UNITS, BlockScale, BlockSizesLaunch, blocks_kernel, numbers_kernel,
};

/// The numbers that the elements of a matrix stand for, in f32.
///
/// # Shapes
/// `[rows, k]`, as the matrix
pub(crate) fn numbers(x: Fp8Matrix) -> CubeTensor {
    let values = tensor::contiguous(x.values);
    let out = tensor::empty(&values, values.meta.shape().clone(), DType::F32);
    let elements = out.meta.num_elements();
    if elements > 0 {
        numbers_kernel::launch(
            &out.client,
            CubeCount::Static(elements.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            address_type(&[&values, &out]),
            values.into_buffer_arg(),
            x.scale_inv.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            x.kind == Fp8Kind::E5m2,
        );
    }
    out
}

/// How the blocks of a matrix are quantised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockOptions {
    /// The format.
    pub(crate) kind: Fp8Kind,
    /// The largest number of the format.
    pub(crate) largest: f32,
    /// The scale of a block.
    pub(crate) rule: BlockScale,
    /// Rows and columns of a block.
    pub(crate) block: [usize; 2],
}

/// The numbers, in f32, that the elements of a matrix of f32, bf16 or f16 stand for after each of
/// its blocks was quantised with a scale of its own.
///
/// # Shapes
/// `x: [rows, cols]` with any strides; the result is contiguous
pub(crate) fn block_numbers(x: CubeTensor, options: BlockOptions) -> CubeTensor {
    let [rows, cols] = [x.meta.shape()[0], x.meta.shape()[1]];
    let out = tensor::empty(&x, [rows, cols], DType::F32);
    let [tall, wide] = [options.block[0].min(rows), options.block[1].min(cols)];
    if rows * cols > 0 {
        let x = RowView::of(x);
        let blocks = rows.div_ceil(tall) * cols.div_ceil(wide);
        blocks_kernel::launch(
            &out.client,
            CubeCount::Static(blocks as u32, 1, 1),
            CubeDim::new_1d(BLOCK_UNITS),
            address_type(&[&x.tensor, &out]),
            x.tensor.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            BlockSizesLaunch::new(
                rows as u32,
                cols as u32,
                x.stride as u32,
                tall as u32,
                wide as u32,
            ),
            options.largest,
            options.kind == Fp8Kind::E5m2,
            options.rule,
            dtype_to_storage_type(x.tensor.dtype),
        );
    }
    out
}
