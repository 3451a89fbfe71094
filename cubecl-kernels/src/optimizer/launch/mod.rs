//! Launches the optimizer kernels.

mod adamw;
pub(super) mod fp8_moment;
pub(super) mod gradients;
mod lion;
mod many;
pub(super) mod remainder;
mod sgd;

use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::{UNITS, copy_kernel};
pub(super) use adamw::{adamw, adamw_all};
pub(super) use lion::lion;
pub(super) use sgd::sgd;

/// Converts a tensor that is on a GPU, and makes it contiguous.
fn on_gpu(x: Tensor<1>) -> CubeTensor {
    let primitive = x.try_into_primitive::<Cube>();
    let primitive = primitive.expect("optimizer state is on the gradient's device");
    tensor::contiguous(tensor::from_backend(primitive))
}

fn wrap(x: CubeTensor) -> Tensor<1> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}

/// The vector width in elements, which must divide `len`: 16 bytes of the widest buffer, else four
/// elements, else one.
fn lanes(len: usize, dtypes: &[DType]) -> usize {
    let widest = dtypes
        .iter()
        .map(|dtype| dtype.size())
        .max()
        .expect("there is at least one buffer");
    [16 / widest, 4]
        .into_iter()
        .find(|lanes| len.is_multiple_of(*lanes))
        .unwrap_or(1)
}

/// Returns `x`, or a copy of it if other tensors share its memory.
fn own(x: CubeTensor) -> CubeTensor {
    if x.can_mut() {
        return x;
    }
    let copy = tensor::empty(&x, x.shape(), x.dtype);
    let len = x.meta.num_elements();
    let dtype = dtype_to_storage_type(x.dtype);
    let lanes = lanes(len, &[x.dtype]);
    copy_kernel::launch(
        &x.client.clone(),
        cubes(len / lanes),
        units(),
        lanes,
        x.into_buffer_arg(),
        copy.clone().into_buffer_arg(),
        len / lanes,
        dtype,
    );
    copy
}

/// The tensor, or a placeholder: every kernel argument needs a buffer, even if the kernel does not
/// read it.
fn or_none(x: &Option<CubeTensor>, like: &CubeTensor, dtype: DType) -> CubeTensor {
    x.clone().unwrap_or_else(|| tensor::empty(like, [1], dtype))
}

fn units() -> CubeDim {
    CubeDim::new_1d(UNITS as u32)
}

fn cubes(units: usize) -> CubeCount {
    CubeCount::Static(units.div_ceil(UNITS) as u32, 1, 1)
}
