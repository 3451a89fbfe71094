//! Matrix products by each backend's best GEMM: Flex by its own, CUDA through cuBLASLt, other GPUs
//! through CubeCL's.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{FloatDType, Tensor};
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::{on_composed_backends, on_every_backend};

/// Which algorithm computes a matrix product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmAlgorithm {
    /// Chosen by timing at the first product of about its shape, if the device's options allow it.
    #[default]
    Tuned,
    /// The library's first choice: equal matrices have bit-identical products on all devices of a
    /// kind. Use it for values that several ranks compute redundantly, and for shapes that change
    /// too often to be timed.
    Deterministic,
}

/// How a matrix product is scaled, rounded and computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductOptions {
    /// A factor of the product.
    pub(crate) scale: f64,
    /// The type of the result.
    pub(crate) dtype: FloatDType,
    /// The algorithm.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "only cuBLASLt has a choice")
    )]
    pub(crate) algorithm: GemmAlgorithm,
}

impl ProductOptions {
    /// A product in `dtype`, with factor 1 and a tuned algorithm.
    pub(crate) fn new(dtype: impl Into<FloatDType>) -> Self {
        Self {
            scale: 1.0,
            dtype: dtype.into(),
            algorithm: GemmAlgorithm::Tuned,
        }
    }

    pub(crate) fn with_scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    pub(crate) fn with_algorithm(self, algorithm: GemmAlgorithm) -> Self {
        Self { algorithm, ..self }
    }
}

/// The matrix products of a backend. Inputs may be views, transposed or sliced.
pub(crate) trait GemmOps: Backend {
    /// `a b * scale`, accumulated in f32 or wider.
    ///
    /// # Shapes
    /// `a: [.., m, k]`, `b: [.., k, n]` of one dtype
    fn product(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        options: ProductOptions,
    ) -> FloatTensor<Self> {
        gemm_in_f32::<Self>(a, b, options)
    }

    /// `x w + bias` in the dtype of `x`.
    ///
    /// # Shapes
    /// `x: [t, k]`, `w: [k, n]`, `bias: [n]`
    fn affine(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        _: GemmAlgorithm,
    ) -> FloatTensor<Self> {
        match without_elements::<Self>(&x, &w, x.dtype().into()) {
            Some(y) if y.shape().num_elements() == 0 => y,
            _ => Self::linear(x, w, bias),
        }
    }
}

/// `a b` in the dtype of both, for tensors without a graph. (On GPUs Burn's own product rounds f32
/// to tf32, with ten bits of mantissa, where its autotuning finds that faster.)
///
/// # Shapes
/// `a: [.., m, k]`, `b: [.., k, n]`
pub(crate) fn multiply<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let options = ProductOptions::new(a.dtype());
    multiply_with(a, b, options)
}

/// [`multiply`] with options.
///
/// # Shapes
/// `a: [.., m, k]`, `b: [.., k, n]`
pub(crate) fn multiply_with<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    options: ProductOptions,
) -> Tensor<D> {
    let a = a.into_dispatch();
    let b = b.into_dispatch();
    Tensor::from_dispatch(<Dispatch as PlainGemm>::plain_gemm(a, b, options))
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray")
)]
trait PlainGemm: Backend {
    fn plain_gemm(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        options: ProductOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl PlainGemm {
        fn plain_gemm(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            options: ProductOptions,
        ) -> FloatTensor<Self> {
            Self::product(a, b, options)
        }
    }
}

/// The product of `a` and `b` if one has no elements, which not all backends multiply: zeros if only the
/// dimension that is summed over is 0. `None` if both have elements.
pub(crate) fn without_elements<B: Backend>(
    a: &FloatTensor<B>,
    b: &FloatTensor<B>,
    dtype: FloatDType,
) -> Option<FloatTensor<B>> {
    if a.shape().num_elements() > 0 && b.shape().num_elements() > 0 {
        return None;
    }
    let mut shape = a.shape();
    let last = a.rank() - 1;
    shape[last] = b.shape()[last];
    Some(match shape.num_elements() {
        0 => B::float_empty(shape, &a.device(), dtype),
        _ => B::float_zeros(shape, &a.device(), dtype),
    })
}

fn gemm_in_f32<B: Backend>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    options: ProductOptions,
) -> FloatTensor<B> {
    let ProductOptions { scale, dtype, .. } = options;
    if let Some(product) = without_elements::<B>(&a, &b, dtype) {
        return product;
    }
    let wide = megaburn_autograd::backend_ops::compute_dtype(a.dtype());
    let a = cast::<B>(a, wide);
    let a = if scale == 1.0 {
        a
    } else {
        B::float_mul_scalar(a, scale.into())
    };
    cast::<B>(B::float_matmul(a, cast::<B>(b, wide)), dtype)
}

/// `w` with its last two dimensions swapped.
pub(crate) fn swapped<B: Backend>(w: FloatTensor<B>) -> FloatTensor<B> {
    let rank = w.rank();
    B::float_swap_dims(w, rank - 2, rank - 1)
}

on_composed_backends! {
    impl GemmOps {}
}

#[cfg(feature = "cuda")]
pub(crate) mod cube {
    use burn::backend::Cube;
    use burn::backend::ops::ModuleOps;
    use burn::tensor::DType;
    use megaburn_cuda::{CudaQueue, gemm, tensor};

    use super::*;

    impl GemmOps for Cube {
        fn product(
            a: FloatTensor<Self>,
            b: FloatTensor<Self>,
            options: ProductOptions,
        ) -> FloatTensor<Self> {
            if let Some(zeros) = without_terms::<Self>(&a, &b, options.dtype) {
                return zeros;
            }
            let a = tensor::from_backend(a);
            let b = tensor::from_backend(b);
            let out = DType::from(options.dtype);
            if CudaQueue::of(&a).is_some() && gemm::takes(a.dtype, b.dtype, out) {
                let options = gemm::ProductOptions {
                    scale: options.scale as f32,
                    ..cublas_options(out, options.algorithm)
                };
                return tensor::into_backend(done(gemm::product(a, b, None, options)));
            }
            gemm_in_f32::<Self>(tensor::into_backend(a), tensor::into_backend(b), options)
        }

        fn affine(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            bias: Option<FloatTensor<Self>>,
            algorithm: GemmAlgorithm,
        ) -> FloatTensor<Self> {
            let x = tensor::from_backend(x);
            let w = tensor::from_backend(w);
            let bias = bias.map(tensor::from_backend);
            if CudaQueue::of(&x).is_some() && gemm::takes(x.dtype, w.dtype, x.dtype) {
                let options = cublas_options(x.dtype, algorithm);
                return tensor::into_backend(done(gemm::product(x, w, bias, options)));
            }
            let bias = bias.map(tensor::into_backend);
            Self::linear(tensor::into_backend(x), tensor::into_backend(w), bias)
        }
    }

    pub(crate) fn cublas_options(dtype: DType, algorithm: GemmAlgorithm) -> gemm::ProductOptions {
        gemm::ProductOptions {
            scale: 1.0,
            dtype,
            tune: algorithm == GemmAlgorithm::Tuned,
        }
    }

    /// Zeros if the inner dimension is 0, as in the weight gradient of no rows; `None` otherwise.
    /// GEMM libraries do not support such products.
    fn without_terms<B: Backend>(
        a: &FloatTensor<B>,
        b: &FloatTensor<B>,
        dtype: FloatDType,
    ) -> Option<FloatTensor<B>> {
        let mut shape = a.shape();
        let last = a.rank() - 1;
        if shape[last] > 0 {
            return None;
        }
        shape[last] = b.shape()[last];
        Some(B::float_zeros(shape, &a.device(), dtype))
    }

    /// Unwraps a launch. Shapes and dtypes were checked before; failures on the device surface at
    /// the next read.
    #[expect(
        clippy::panic,
        reason = "an operation on tensors cannot return an error"
    )]
    pub(crate) fn done<T>(result: Result<T, megaburn_cuda::CudaError>) -> T {
        result.unwrap_or_else(|error| panic!("{error}"))
    }
}
