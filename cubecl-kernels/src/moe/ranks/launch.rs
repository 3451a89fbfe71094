//! The kernel; each unit handles one token.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Int, Tensor};
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use crate::moe::tensors::{UNITS, ints, wrap_ints};

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

#[cube]
fn rank<I: Numeric>(experts: &[I], slot: u32, of_rank: i64) -> i64 {
    // Compare in 64 bits: the lower half of an invalid 64-bit number may look like an expert.
    let expert = i64::cast_from(experts[slot as usize]);
    select(expert >= 0, expert / of_rank, -1)
}

#[cube(launch)]
fn ranks_kernel<I: Numeric>(
    experts: &[I],
    ranks: &mut [i32],
    tokens: u32,
    of_rank: i64,
    #[comptime] top_k: u32,
    #[define(I)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < tokens as usize {
        let first = ABSOLUTE_POS as u32 * top_k;
        for slot in 0..top_k {
            let mine = rank::<I>(experts, first + slot, of_rank);
            let mut found = i32::cast_from(mine);
            for before in 0..slot {
                if rank::<I>(experts, first + before, of_rank) == mine {
                    found = -1;
                }
            }
            ranks[(first + slot) as usize] = found;
        }
    }
}
