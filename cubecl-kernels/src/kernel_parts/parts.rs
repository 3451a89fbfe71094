use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::address_type;

/// Sums f32 partial sums `[parts, n]` to `[n]`, in the dtype paired with each, by one kernel and in
/// a fixed order. Without parts the sums are 0.
pub(crate) fn sum_parts<const K: usize>(
    sums: [(CubeTensor, DType); K],
    parts: u32,
) -> [CubeTensor; K] {
    let n = sums[0].0.meta.shape()[1];
    let totals = sums
        .each_ref()
        .map(|(sum, dtype)| tensor::empty(sum, [n], *dtype));
    let mut places = totals.iter().cloned();
    put_parts(
        sums.map(|(sum, _)| (sum, places.next().expect("there is one total per sum"))),
        parts,
        false,
    );
    totals
}

/// Like [`sum_parts`], but writes each sum to the `n` elements of the tensor paired with it or, if
/// `add`, adds it to them.
pub(crate) fn put_parts<const K: usize>(
    sums: [(CubeTensor, CubeTensor); K],
    parts: u32,
    add: bool,
) {
    let n = sums[0].0.meta.shape()[1];
    let first = &sums[0];
    let second = sums.get(1).unwrap_or(&sums[0]);
    if n > 0 {
        parts_kernel::launch(
            &first.0.client,
            CubeCount::Static(n.div_ceil(32) as u32, 1, 1),
            CubeDim::new_2d(32, 16),
            address_type(&[&first.0]),
            first.0.clone().into_buffer_arg(),
            second.0.clone().into_buffer_arg(),
            first.1.clone().into_buffer_arg(),
            second.1.clone().into_buffer_arg(),
            parts,
            n as u32,
            K == 2,
            add,
            [first.1.dtype, second.1.dtype].map(dtype_to_storage_type),
        );
    }
}

/// A cube sums 32 columns; each of its planes takes every 16th part.
#[cube(launch, address_type = "dynamic")]
fn parts_kernel<G: Float, H: Float>(
    parts_1: &[f32],
    parts_2: &[f32],
    total_1: &mut [G],
    total_2: &mut [H],
    parts: u32,
    len: u32,
    #[comptime] two: bool,
    #[comptime] add: bool,
    #[define(G, H)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(1024usize);
    let column = CUBE_POS_X * 32 + UNIT_POS_X;
    let mut sum_1 = f32::new(0.0);
    let mut sum_2 = f32::new(0.0);
    if column < len {
        let mut first = UNIT_POS_Y;
        while first < parts {
            // Unrolled, so that 8 reads are in flight at once.
            #[unroll]
            for i in 0..8u32 {
                let part = first + i * 16;
                if part < parts {
                    let at = part as usize * len as usize + column as usize;
                    sum_1 += parts_1[at];
                    if comptime!(two) {
                        sum_2 += parts_2[at];
                    }
                }
            }
            first += 128;
        }
    }
    shared[UNIT_POS as usize] = sum_1;
    shared[(512 + UNIT_POS) as usize] = sum_2;
    sync_cube();
    if UNIT_POS_Y == 0 && column < len {
        sum_1 = 0.0;
        sum_2 = 0.0;
        #[unroll]
        for plane in 0..16u32 {
            sum_1 += shared[(plane * 32 + UNIT_POS_X) as usize];
            sum_2 += shared[(512 + plane * 32 + UNIT_POS_X) as usize];
        }
        let column = column as usize;
        if comptime!(add) {
            sum_1 += f32::cast_from(total_1[column]);
        }
        total_1[column] = G::cast_from(sum_1);
        if comptime!(two) {
            if comptime!(add) {
                sum_2 += f32::cast_from(total_2[column]);
            }
            total_2[column] = H::cast_from(sum_2);
        }
    }
}
