//! Conversions between a backend's tensors and Burn's.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use crate::MainGrad;
use crate::backends::on_every_backend;
use crate::linear::LinearPass;

/// Wraps a backend's tensors as Burn's, and back.
pub(crate) trait IntoPrimitive: Backend {
    fn wrap(x: FloatTensor<Self>) -> Tensor<2>;
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

/// The weight to compute with: from the [source](MainGrad::with_source) of `main_grad` if it has
/// one, otherwise `weight`.
pub(crate) fn read_weight<B: IntoPrimitive>(
    weight: FloatTensor<B>,
    main_grad: Option<&MainGrad>,
    pass: LinearPass,
) -> FloatTensor<B> {
    main_grad
        .and_then(|main_grad| main_grad.weight(pass))
        .map_or(weight, B::unwrap)
}
