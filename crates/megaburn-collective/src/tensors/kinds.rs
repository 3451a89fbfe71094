//! Which tensors collectives can move, and access to their GPU memory.

use burn::tensor::{Float, Int, kind::Basic};
#[cfg(feature = "cuda")]
use {
    crate::{CollectiveError, Group, ReduceOp, device},
    burn::{backend::Cube, tensor::Tensor},
    burn_cubecl::{CubeBackend, tensor::CubeTensor},
    megaburn_cuda::{
        AsyncOp,
        nccl::Lane,
        tensor::{from_backend, into_backend},
    },
};

mod sealed {
    pub trait Sealed {}
    impl Sealed for burn::tensor::Float {}
    impl Sealed for burn::tensor::Int {}
}

/// A kind of tensor that collectives move: floats and integers.
pub trait CollectiveElement: Basic + sealed::Sealed {
    /// Returns the tensor's GPU memory, if it is on a CUDA device.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    fn to_gpu<const D: usize>(x: &Tensor<D, Self>) -> Option<CubeTensor>
    where
        Self: Sized;

    /// Wraps memory on a CUDA device as a tensor.
    #[cfg(feature = "cuda")]
    #[doc(hidden)]
    fn from_gpu<const D: usize>(x: CubeTensor) -> Tensor<D, Self>
    where
        Self: Sized;
}

macro_rules! moved {
    ($($kind:ty),*) => {
        $(impl CollectiveElement for $kind {
            #[cfg(feature = "cuda")]
            fn to_gpu<const D: usize>(x: &Tensor<D, Self>) -> Option<CubeTensor> {
                let x = from_backend(x.clone().try_into_primitive::<Cube>().ok()?);
                device::is_on_gpu(&x).then_some(x)
            }

            #[cfg(feature = "cuda")]
            fn from_gpu<const D: usize>(x: CubeTensor) -> Tensor<D, Self> {
                Tensor::from_primitive::<Cube>(into_backend(x))
            }
        })*
    };
}

moved!(Float, Int);

/// NCCL's all-reduce, except that a maximum propagates NaN.
#[cfg(feature = "cuda")]
pub(super) fn all_reduce_on_gpu(
    x: CubeTensor,
    op: ReduceOp,
    group: &Group,
    lane: Lane,
) -> Result<AsyncOp, CollectiveError> {
    if op != ReduceOp::Max || !x.dtype.is_float() {
        return group.gpu_all_reduce(x, op, lane);
    }
    // The maximum is followed by a kernel that restores NaN, so wait for the collective here.
    let max = |x| group.gpu_all_reduce(x, op, lane).map(AsyncOp::wait);
    device::nan_propagating_max::<CubeBackend, _>(x, max).map(AsyncOp::done)
}
