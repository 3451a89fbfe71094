//! Between Burn's tensors and CubeCL's.

use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::tensor;

/// A GPU's tensor; none of a CPU's, or of one with a graph.
pub(crate) fn on_gpu<const D: usize>(x: &Tensor<D>) -> Option<CubeTensor> {
    x.clone()
        .try_into_primitive::<Cube>()
        .ok()
        .map(tensor::from_backend)
}

/// The inverse.
pub(crate) fn wrap<const D: usize>(x: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<Cube>(tensor::into_backend(x))
}
