//! Which tensors collectives can move, and access to their GPU memory.

use burn::tensor::{Float, Int, kind::Basic};
#[cfg(feature = "cuda")]
use {
    crate::device::is_on_gpu,
    burn::{backend::Cube, tensor::Tensor},
    burn_cubecl::tensor::CubeTensor,
    megaburn_cuda::tensor::{from_backend, into_backend},
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
                is_on_gpu(&x).then_some(x)
            }

            #[cfg(feature = "cuda")]
            fn from_gpu<const D: usize>(x: CubeTensor) -> Tensor<D, Self> {
                Tensor::from_primitive::<Cube>(into_backend(x))
            }
        })*
    };
}

moved!(Float, Int);
