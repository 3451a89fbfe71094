use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::amax::amax;
use crate::kernel_parts::address_type;
use crate::quantized::kernels::{
    packed_weight_by_four_kernel, packed_weight_kernel, unpacked_weight_by_four_kernel,
    unpacked_weight_kernel,
};
use crate::quantized::sent_weight::SentScale;

/// Units of a cube.
const UNITS: usize = 256;

/// [`SentScale::packed`] of a weight that is not empty.
pub(in crate::quantized) fn packed_weight(
    x: Tensor<1>,
    scale: &SentScale,
    room: Option<Tensor<1>>,
) -> Tensor<1> {
    let x = on_gpu(x);
    let len = x.meta.num_elements();
    let packed = room.map_or_else(|| tensor::empty(&x, [len.div_ceil(2)], DType::BF16), on_gpu);
    let by_four = len.is_multiple_of(4);
    let launch = match by_four {
        true => packed_weight_by_four_kernel::launch,
        false => packed_weight_kernel::launch,
    };
    launch(
        &x.client.clone(),
        cubes(len, by_four),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&x, &packed]),
        x.into_buffer_arg(),
        on_gpu(scale.amax.clone()).into_buffer_arg(),
        packed.clone().into_buffer_arg(),
        len,
        scale.power_of_two,
    );
    wrap(packed)
}

/// [`SentScale::unpacked`] of `len` numbers, more than 0.
pub(in crate::quantized) fn unpacked_weight(
    packed: Tensor<1>,
    scale: &SentScale,
    len: usize,
    room: Option<Tensor<1>>,
) -> Tensor<1> {
    let packed = on_gpu(packed);
    let x = room.map_or_else(|| tensor::empty(&packed, [len], DType::BF16), on_gpu);
    let by_four = len.is_multiple_of(4);
    let launch = match by_four {
        true => unpacked_weight_by_four_kernel::launch,
        false => unpacked_weight_kernel::launch,
    };
    launch(
        &packed.client.clone(),
        cubes(len, by_four),
        CubeDim::new_1d(UNITS as u32),
        address_type(&[&packed, &x]),
        packed.into_buffer_arg(),
        on_gpu(scale.amax.clone()).into_buffer_arg(),
        x.clone().into_buffer_arg(),
        len,
        scale.power_of_two,
    );
    wrap(x)
}

/// The largest magnitude of a tensor that is not empty.
pub(in crate::quantized) fn largest_magnitude(x: Tensor<1>) -> Tensor<1> {
    wrap(amax(on_gpu(x)))
}

/// Enough cubes for all units, each of which has four codes, or two.
fn cubes(len: usize, by_four: bool) -> CubeCount {
    let per_unit = if by_four { 4 } else { 2 };
    CubeCount::Static(len.div_ceil(per_unit * UNITS) as u32, 1, 1)
}

fn on_gpu(x: Tensor<1>) -> CubeTensor {
    let primitive = x.try_into_primitive::<Cube>();
    let primitive = primitive.expect("weight and scale are on the same device");
    tensor::contiguous(tensor::from_backend(primitive))
}

fn wrap(x: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}
