//! Conversions between Burn's tensors and CubeCL's.

use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

/// The GPU tensor of `x`; `None` for a CPU tensor or one with a graph.
pub(crate) fn on_gpu<const D: usize>(x: &Tensor<D>) -> Option<CubeTensor> {
    x.clone()
        .try_into_primitive::<Cube>()
        .ok()
        .map(tensor::from_backend)
}

/// The inverse of [`on_gpu`].
pub(crate) fn wrap<const D: usize>(x: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}
