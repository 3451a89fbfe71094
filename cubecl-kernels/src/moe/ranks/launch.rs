//! Launches the kernel.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::ranks_kernel;
use crate::moe::launch::{UNITS, ints, wrap_ints};

pub(super) fn ep_ranks_of_experts(experts: Tensor<2, Int>, of_rank: usize) -> Tensor<2, Int> {
    let experts = ints(experts);
    let [t, k] = experts.shape().dims();
    let client = experts.client.clone();
    let dtype = dtype_to_storage_type(experts.dtype);
    let ranks = tensor::empty(&experts, [t, k], DType::I32);
    ranks_kernel::launch(
        &client,
        CubeCount::Static(t.div_ceil(UNITS) as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        experts.into_buffer_arg(),
        ranks.clone().into_buffer_arg(),
        t as u32,
        of_rank as i64,
        k as u32,
        dtype,
    );
    wrap_ints(ranks)
}
