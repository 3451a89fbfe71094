//! What the launches over experts share: conversions between Burn's tensors and CubeCL's, and the
//! grid.

use burn::backend::Cube;
use burn::tensor::{Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use megaburn_cuda::tensor;

use super::kernels::TOKENS;

/// Units per cube of kernels whose units are independent.
pub(super) const UNITS: usize = 256;

/// Whether `x` is on a CubeCL GPU backend. (Always `false` for a tensor with an autodiff graph.)
pub(super) fn on_gpu(x: &Tensor<2>) -> bool {
    x.clone().try_into_primitive::<Cube>().is_ok()
}

/// [`on_gpu`] for an integer tensor.
pub(super) fn ints_on_gpu<const D: usize>(x: &Tensor<D, Int>) -> bool {
    x.clone().try_into_primitive::<Cube>().is_ok()
}

/// Converts a tensor that is on the GPU, keeping its strides.
pub(super) fn floats<const D: usize>(x: Tensor<D>) -> CubeTensor {
    let x = x
        .try_into_primitive::<Cube>()
        .expect("operands are on the same device");
    tensor::from_backend(x)
}

/// Converts an integer tensor that is on the GPU, and makes it contiguous.
pub(super) fn ints<const D: usize>(x: Tensor<D, Int>) -> CubeTensor {
    let x = x
        .try_into_primitive::<Cube>()
        .expect("operands are on the same device");
    tensor::contiguous(tensor::from_backend(x))
}

pub(super) fn wrap_ints<const D: usize>(x: CubeTensor) -> Tensor<D, Int> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}

/// The grid of kernels with a plane for each token.
pub(super) fn cubes(tokens: usize) -> CubeCount {
    CubeCount::Static(tokens.div_ceil(TOKENS) as u32, 1, 1)
}
