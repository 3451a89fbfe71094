//! Gradient accumulation fusion: the matrix product that adds a weight's gradient to its
//! [`MainGrad`](megaburn_autograd::MainGrad) (Megatron-LM `--gradient-accumulation-fusion`,
//! `wgrad_gemm_accum_fp32`).

use burn::backend::ops::ModuleOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Tensor};
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::on_composed_backends;

use crate::gemm_ops::{GemmAlgorithm, GemmOps, swapped, without_elements};

/// The weight-gradient product of a backend.
pub(crate) trait GradAccumFusion: GemmOps {
    /// `sum + xᵀ dy` in f32; without `sum` it is `xᵀ dy`, which may then be written to `room`.
    /// `sum` and `room` may be written in place.
    ///
    /// # Shapes
    /// `x: [t, k]`, `dy: [t, n]`; `sum`, `room` and the result are `[k, n]`
    fn add_weight_gradient(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: Option<Tensor<2>>,
        room: Option<Tensor<2>>,
        algorithm: GemmAlgorithm,
    ) -> Tensor<2>;
}

/// `sum + term` in f32.
pub(crate) fn plus(sum: Option<Tensor<2>>, term: Tensor<2>) -> Tensor<2> {
    let term = term.cast(DType::F32);
    match sum {
        Some(sum) => sum + term,
        None => term,
    }
}

on_composed_backends! {
    impl GradAccumFusion {
        fn add_weight_gradient(
            x: FloatTensor<Self>,
            dy: FloatTensor<Self>,
            sum: Option<Tensor<2>>,
            _: Option<Tensor<2>>,
            _: GemmAlgorithm,
        ) -> Tensor<2> {
            // A product in a narrow dtype would be rounded before it is added to the sum.
            let [x, dy] = [x, dy].map(|x| cast::<Self>(x, FloatDType::F32));
            let of_no_rows = swapped::<Self>(x.clone());
            let of_no_rows = without_elements::<Self>(&of_no_rows, &dy, FloatDType::F32);
            let product = of_no_rows.unwrap_or_else(|| Self::linear_weight_backward(x, dy));
            plus(sum, Tensor::from_primitive::<Self>(product))
        }
    }
}

#[cfg(feature = "cuda")]
mod cube {
    use burn::backend::{Cube, TensorMetadata};
    use megaburn_cuda::{CudaQueue, gemm, tensor};

    use super::*;
    use crate::gemm_ops::ProductOptions;
    use crate::gemm_ops::cube::{cublas_options, done};

    impl GradAccumFusion for Cube {
        fn add_weight_gradient(
            x: FloatTensor<Self>,
            dy: FloatTensor<Self>,
            sum: Option<Tensor<2>>,
            room: Option<Tensor<2>>,
            algorithm: GemmAlgorithm,
        ) -> Tensor<2> {
            if x.shape()[0] == 0 {
                let options = ProductOptions::new(FloatDType::F32);
                let none = Self::product(swapped::<Self>(x), dy, options);
                return plus(sum, Tensor::from_primitive::<Self>(none));
            }
            let x = tensor::from_backend(x);
            let dy = tensor::from_backend(dy);
            if CudaQueue::of(&x).is_none() || !gemm::takes(x.dtype, dy.dtype, DType::F32) {
                let [x, dy] =
                    [x, dy].map(|x| cast::<Self>(tensor::into_backend(x), FloatDType::F32));
                return plus(
                    sum,
                    Tensor::from_primitive::<Self>(Self::linear_weight_backward(x, dy)),
                );
            }
            let x = tensor::transposed(x);
            let options = cublas_options(DType::F32, algorithm);
            let into_options = gemm::ProductIntoOptions {
                add: sum.is_some(),
                tune: options.tune,
            };
            let sum = match sum.or(room) {
                None => done(gemm::product(x, dy, None, options)),
                Some(sum) => {
                    let sum = sum.try_into_primitive::<Self>();
                    let sum = tensor::from_backend(sum.expect(
                        "the gradient is on the weight's \
                        device",
                    ));
                    done(gemm::product_into(x, dy, &sum, into_options));
                    sum
                }
            };
            Tensor::from_primitive::<Self>(tensor::into_backend(sum))
        }
    }
}
