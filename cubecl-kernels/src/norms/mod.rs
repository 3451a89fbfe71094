//! The common implementation of RMS norm and layer norm: one operation with options, composed of
//! primitives on CPUs and fused kernels on GPUs.

mod add;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
pub(crate) mod layer_norm;
mod op;
mod options;
pub(crate) mod reference;
pub(crate) mod rms_norm;
#[cfg(feature = "cuda")]
mod vectors;

use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

use crate::bias::ColumnSum;
pub(crate) use add::norm_add;
pub(crate) use op::norm;
pub(crate) use options::{Formula, check};
pub use options::{NormGrads, NormOptions};

/// Which norm is computed, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    /// Whether the mean is subtracted (layer norm).
    pub(crate) centered: bool,
    pub(crate) options: Formula,
    /// Whether the bits equal those under autodiff even when there is no autodiff.
    pub(crate) bit_exact_with_training: bool,
}

/// A norm, and where the gradients of its gamma and beta go.
#[derive(Clone, Debug)]
pub(crate) struct NormCall {
    pub(crate) norm: Norm,
    pub(crate) sums: NormGrads,
}

impl NormCall {
    /// A call of RMS norm.
    pub(crate) fn rms(options: impl Into<NormOptions>) -> Self {
        Self::new(options.into(), false)
    }

    /// A call of layer norm.
    pub(crate) fn layer(options: impl Into<NormOptions>) -> Self {
        Self::new(options.into(), true)
    }

    fn new(options: NormOptions, centered: bool) -> Self {
        let NormOptions {
            epsilon,
            zero_centered_gamma,
            main_grads,
        } = options;
        let options = Formula {
            epsilon,
            zero_centered_gamma,
        };
        Self {
            norm: Norm {
                centered,
                options,
                bit_exact_with_training: false,
            },
            sums: main_grads,
        }
    }

    /// Requests the same bits as under autodiff.
    pub(crate) fn bit_exact_with_training(self) -> Self {
        Self {
            norm: Norm {
                bit_exact_with_training: true,
                ..self.norm
            },
            ..self
        }
    }
}

/// The inputs of a norm.
///
/// # Shapes
/// `x`, `residual`: `[.., n]`; `gamma`, `beta`: `[n]`
#[derive(Clone, Debug)]
pub(crate) struct NormInput<T> {
    pub(crate) x: T,
    /// Added to `x` first.
    pub(crate) residual: Option<T>,
    pub(crate) gamma: T,
    pub(crate) beta: Option<T>,
}

#[cfg(feature = "cuda")]
impl<T> NormInput<T> {
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> NormInput<U> {
        let Self {
            x,
            residual,
            gamma,
            beta,
        } = self;
        let [x, gamma] = [x, gamma].map(&mut f);
        let [residual, beta] = [residual, beta].map(|t| t.map(&mut f));
        NormInput {
            x,
            residual,
            gamma,
            beta,
        }
    }
}

/// Tensors saved for backward.
#[derive(Clone, Debug)]
pub(crate) struct SavedNorm<T> {
    /// The normalized input (`x + residual` if there is a residual), in its dtype.
    pub(crate) x: T,
    /// Row means, `[rows, 1]`; layer norm only.
    pub(crate) mean: Option<T>,
    /// The divisors of rows, `[rows, 1]`, in the fallback; their inverses where kernels compute the
    /// norm.
    pub(crate) deviation: T,
    pub(crate) gamma: T,
    /// The dtype of beta, if there is one.
    pub(crate) beta: Option<DType>,
    /// The dtype of the input.
    pub(crate) dtype: DType,
}

#[cfg(feature = "cuda")]
impl<T> SavedNorm<T> {
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> SavedNorm<U> {
        let Self {
            x,
            mean,
            deviation,
            gamma,
            beta,
            dtype,
        } = self;
        let [x, deviation, gamma] = [x, deviation, gamma].map(&mut f);
        SavedNorm {
            x,
            mean: mean.map(f),
            deviation,
            gamma,
            beta,
            dtype,
        }
    }
}

/// Gradients, each in the dtype of its input. Those of gamma and beta are `None` if they were added
/// to main gradients.
pub(crate) struct NormInputGrads<T> {
    /// The gradient of `x`, which is also the gradient of the residual.
    pub(crate) x: T,
    pub(crate) gamma: Option<T>,
    pub(crate) beta: Option<T>,
}

/// A norm and its backward pass, with the best implementation per backend.
pub(crate) trait NormRows: ColumnSum {
    /// Returns the normalized rows, without saving anything for backward.
    fn normed(norm: Norm, input: NormInput<FloatTensor<Self>>) -> FloatTensor<Self> {
        fallback::normed::<Self>(norm, input)
    }

    /// Returns the normalized rows, the norm's input (`x + residual`, or `x`), and the saved
    /// tensors.
    fn forward(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        SavedNorm<FloatTensor<Self>>,
    ) {
        fallback::forward::<Self>(norm, input)
    }

    /// Computes the gradients from `dy` of the normalized rows and `dsum` of the norm's input.
    fn backward(
        norm: Norm,
        saved: SavedNorm<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        dsum: Option<FloatTensor<Self>>,
        sums: &NormGrads,
    ) -> NormInputGrads<FloatTensor<Self>> {
        fallback::backward::<Self>(norm, saved, dy, dsum, sums)
    }
}

#[cfg(feature = "flex")]
impl NormRows for burn::backend::Flex {}
