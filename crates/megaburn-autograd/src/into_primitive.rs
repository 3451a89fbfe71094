//! Conversions between a backend's tensors and Burn's.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use crate::on_every_backend;

/// Wraps a backend's tensors as Burn's, and back.
pub trait IntoPrimitive: Backend {
    /// Burn's tensor of `x`, which has two dimensions.
    fn wrap(x: FloatTensor<Self>) -> Tensor<2>;
    /// The backend's tensor of `x`.
    ///
    /// # Panics
    /// If `x` is on another backend, or on a device with autodiff.
    fn unwrap(x: Tensor<2>) -> FloatTensor<Self>;
}

on_every_backend! {
    impl IntoPrimitive {
        fn wrap(x: FloatTensor<Self>) -> Tensor<2> {
            Tensor::from_primitive::<Self>(x)
        }

        fn unwrap(x: Tensor<2>) -> FloatTensor<Self> {
            x.try_into_primitive::<Self>().expect("the tensors are on the same backend")
        }
    }
}
