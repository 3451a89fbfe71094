//! Launches the kernels for moments in 8 bits per element.

use burn::tensor::{DType, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::{cubes, on_gpu, units, wrap};
use crate::optimizer::fp8_moment::{FP8_MOMENT_BLOCK, Fp8Moment};
use crate::optimizer::kernels::fp8_moment::{
    BLOCKS, PackedMomentLaunch, block_units, packed_moment_kernel, unpacked_moment_kernel,
};

/// Packs a moment that is not empty.
pub(in crate::optimizer) fn packed_moment(
    x: Tensor<1>,
    code: Fp8Moment,
    seed: u32,
    first: u32,
) -> Tensor<1> {
    let x = on_gpu(x);
    let len = x.meta.num_elements();
    let blocks = len.div_ceil(FP8_MOMENT_BLOCK);
    let words = blocks * (FP8_MOMENT_BLOCK / 2 + 1);
    let packed = tensor::empty(&x, [words], DType::BF16);
    packed_moment_kernel::launch(
        &x.client.clone(),
        CubeCount::Static(blocks.div_ceil(BLOCKS) as u32, 1, 1),
        block_units(),
        x.into_buffer_arg(),
        packed.clone().into_buffer_arg(),
        PackedMomentLaunch {
            len: len as u32,
            blocks: blocks as u32,
            seed,
            first,
        },
        code == Fp8Moment::Root,
    );
    wrap(packed)
}

/// Unpacks a moment of `len` elements, more than 0.
pub(in crate::optimizer) fn unpacked_moment(
    packed: Tensor<1>,
    len: usize,
    code: Fp8Moment,
) -> Tensor<1> {
    let packed = on_gpu(packed);
    let x = tensor::empty(&packed, [len], DType::F32);
    unpacked_moment_kernel::launch(
        &packed.client.clone(),
        cubes(len),
        units(),
        packed.into_buffer_arg(),
        x.clone().into_buffer_arg(),
        len as u32,
        len.div_ceil(FP8_MOMENT_BLOCK) as u32,
        code == Fp8Moment::Root,
    );
    wrap(x)
}
