//! Launches the permutation kernels.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::ExpertPermutation;
use super::kernels::{count_kernel, place_kernel};
use crate::moe::launch::{UNITS, ints, wrap_ints};

/// The most cubes: each reads the counts of all.
const CUBES: usize = 128;

pub(super) fn permutation_by_expert(
    experts: Tensor<2, Int>,
    num_experts: usize,
) -> ExpertPermutation {
    let experts = ints(experts);
    let [t, k] = experts.shape().dims();
    let slots = t * k;
    let of_cube = slots.div_ceil(CUBES).next_multiple_of(UNITS);
    let cubes = slots.div_ceil(of_cube);
    let client = experts.client.clone();
    let dtype = dtype_to_storage_type(experts.dtype);
    let [parts, counts, in_order, tokens] = [cubes * (num_experts + 1), num_experts, slots, slots]
        .map(|len| tensor::empty(&experts, [len], DType::I32));
    let rows = tensor::empty(&experts, [t, k], DType::I32);
    count_kernel::launch(
        &client,
        CubeCount::Static(cubes as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        experts.clone().into_buffer_arg(),
        parts.clone().into_buffer_arg(),
        slots as u32,
        of_cube as u32,
        num_experts as u32,
        dtype,
    );
    place_kernel::launch(
        &client,
        CubeCount::Static(cubes as u32, 1, 1),
        CubeDim::new_1d(UNITS as u32),
        experts.into_buffer_arg(),
        parts.into_buffer_arg(),
        counts.clone().into_buffer_arg(),
        in_order.clone().into_buffer_arg(),
        tokens.clone().into_buffer_arg(),
        rows.clone().into_buffer_arg(),
        slots as u32,
        of_cube as u32,
        k as u32,
        num_experts as u32,
        dtype,
    );
    ExpertPermutation {
        counts: wrap_ints(counts),
        slots: wrap_ints(in_order),
        tokens: wrap_ints(tokens),
        rows: wrap_ints(rows),
    }
}
