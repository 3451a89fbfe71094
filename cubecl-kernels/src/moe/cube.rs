//! Between Burn's tensors and CubeCL's.

use burn::backend::Cube;
use burn::tensor::{Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

pub(super) use crate::cube::wrap;

/// Units of a cube whose units have nothing to do with each other.
pub(super) const UNITS: usize = 256;

/// Whether it is a GPU's. (One with a graph is nobody's here.)
pub(super) fn on_gpu(x: &Tensor<2>) -> bool {
    x.clone().try_into_primitive::<Cube>().is_ok()
}

/// The same of numbers.
pub(super) fn ints_on_gpu<const D: usize>(x: &Tensor<D, Int>) -> bool {
    x.clone().try_into_primitive::<Cube>().is_ok()
}

/// One that was found on the GPU, where it is.
pub(super) fn floats<const D: usize>(x: Tensor<D>) -> CubeTensor {
    let x = x
        .try_into_primitive::<Cube>()
        .expect("operands are of one device");
    tensor::from_backend(x)
}

/// Numbers, one behind the other.
pub(super) fn ints<const D: usize>(x: Tensor<D, Int>) -> CubeTensor {
    let x = x
        .try_into_primitive::<Cube>()
        .expect("operands are of one device");
    tensor::contiguous(tensor::from_backend(x))
}

pub(super) fn wrap_ints<const D: usize>(x: CubeTensor) -> Tensor<D, Int> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}
