//! Conversions between a backend's tensors and Burn's.

use burn::backend::Backend;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::tensor::{Bool, Int, Tensor};

use crate::on_every_backend;

/// Wraps a backend's tensors as Burn's, and back.
pub trait IntoPrimitive: Backend {
    /// Burn's tensor of `x`.
    fn wrap<const D: usize>(x: FloatTensor<Self>) -> Tensor<D>;

    /// The backend's tensor of `x`.
    ///
    /// # Panics
    /// If `x` is on another backend, or on a device with autodiff.
    fn unwrap<const D: usize>(x: Tensor<D>) -> FloatTensor<Self>;

    /// As [`unwrap`](Self::unwrap), of integers.
    fn unwrap_int<const D: usize>(x: Tensor<D, Int>) -> IntTensor<Self>;

    /// As [`unwrap`](Self::unwrap), of truth values.
    fn unwrap_bool<const D: usize>(x: Tensor<D, Bool>) -> BoolTensor<Self>;
}

/// What [`IntoPrimitive`] expects of its callers.
const SAME: &str = "the tensors are on the same backend";

on_every_backend! {
    impl IntoPrimitive {
        fn wrap<const D: usize>(x: FloatTensor<Self>) -> Tensor<D> {
            Tensor::from_primitive::<Self>(x)
        }

        fn unwrap<const D: usize>(x: Tensor<D>) -> FloatTensor<Self> {
            x.try_into_primitive::<Self>().expect(SAME)
        }

        fn unwrap_int<const D: usize>(x: Tensor<D, Int>) -> IntTensor<Self> {
            x.try_into_primitive::<Self>().expect(SAME)
        }

        fn unwrap_bool<const D: usize>(x: Tensor<D, Bool>) -> BoolTensor<Self> {
            x.try_into_primitive::<Self>().expect(SAME)
        }
    }
}
