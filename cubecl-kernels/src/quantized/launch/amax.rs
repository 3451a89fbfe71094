use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::loads::loads;
use crate::kernel_parts::{RowView, address_type, lanes};
use crate::quantized::kernels::{AMAX_UNITS, amax_kernel};

/// Most cubes of a launch: eight for each multiprocessor of a large GPU.
const CUBES: usize = 132 * 8;

/// The largest magnitude in a tensor of f32, bf16 or f16 with any strides: NaN if it has a NaN, 0
/// if it is empty. The same bits in every run.
///
/// # Shapes
/// `x: [..]`; result: `[1]` in f32
pub fn amax(x: CubeTensor) -> CubeTensor {
    let one = Shape::new([1]);
    let out = zeros_client(x.client.clone(), x.device.clone(), one, DType::U32);
    let x = RowView::of(by_memory(x));
    let elements = x.count * x.len;
    if elements > 0 {
        let lanes = lanes(x.tensor.dtype, &[x.len, x.stride]);
        let (loads, element, size) = loads(x.tensor.dtype, lanes);
        let vectors = elements / lanes;
        amax_kernel::launch(
            &out.client,
            CubeCount::Static(
                vectors.div_ceil(AMAX_UNITS as usize).min(CUBES) as u32,
                1,
                1,
            ),
            CubeDim::new_2d(32, AMAX_UNITS / 32),
            address_type(&[&x.tensor, &out]),
            size,
            x.tensor.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            vectors,
            x.len / lanes,
            x.stride / lanes,
            x.stride == x.len || x.count == 1,
            loads,
            [element, x.tensor.dtype].map(dtype_to_storage_type),
        );
    }
    as_dtype(out, DType::F32)
}

/// The tensor with its dimensions in the order of its memory, so that a transposed one is read in
/// place: its maximum does not depend on the order.
fn by_memory(mut x: CubeTensor) -> CubeTensor {
    let dims = x.meta.num_dims();
    if x.meta.is_tiled() {
        return x;
    }
    for last in (1..dims).rev() {
        for i in 0..last {
            let strides = x.meta.strides();
            if strides[i] < strides[i + 1] {
                x.meta.swap(i, i + 1);
            }
        }
    }
    x
}

/// The same memory as elements of another type of the same size.
fn as_dtype(x: CubeTensor, dtype: DType) -> CubeTensor {
    let shape = x.meta.shape().clone();
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, dtype)
}
