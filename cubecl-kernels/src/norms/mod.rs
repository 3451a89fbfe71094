//! What RMS norm and layer norm share: one operation with options, composed of primitives on CPUs
//! and of kernels of its own on GPUs.

mod add;
#[cfg(feature = "cuda")]
mod cube;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
mod op;
mod options;
#[cfg(feature = "cuda")]
mod vectors;

use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

use crate::bias::ColumnSum;
pub(crate) use add::norm_add;
pub(crate) use op::NormOps;
pub(crate) use options::{Formula, check};
pub use options::{NormGrads, NormOptions};

/// Which norm, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    /// Layer norm: the mean is subtracted.
    pub(crate) centered: bool,
    pub(crate) options: Formula,
    /// Without autodiff too the bits are those with it.
    pub(crate) bit_exact_with_training: bool,
}

/// A norm, and where the gradients of its gamma and beta go.
#[derive(Clone, Debug)]
pub(crate) struct NormCall {
    pub(crate) norm: Norm,
    pub(crate) sums: NormGrads,
}

impl NormCall {
    /// RMS norm.
    pub(crate) fn rms(options: impl Into<NormOptions>) -> Self {
        Self::new(options.into(), false)
    }

    /// Layer norm.
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

    /// The same to the bits of autodiff.
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

/// What is normalised.
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

/// What the backward reads.
#[derive(Clone, Debug)]
pub(crate) struct SavedNorm<T> {
    /// What was normalised, in its dtype.
    pub(crate) x: T,
    /// Means of rows, of a layer norm. `[rows, 1]`
    pub(crate) mean: Option<T>,
    /// What rows were divided by where norms are composed, its inverse where kernels compute them.
    /// `[rows, 1]`
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

/// Gradients, each in the dtype of what it is of; those of gamma and beta where they were not summed.
pub(crate) struct NormInputGrads<T> {
    /// Of `x`, and of the residual too.
    pub(crate) x: T,
    pub(crate) gamma: Option<T>,
    pub(crate) beta: Option<T>,
}

/// A norm, as each backend computes it best.
pub(crate) trait NormRows: ColumnSum {
    /// The normed rows, for which no gradient is asked.
    fn normed(norm: Norm, input: NormInput<FloatTensor<Self>>) -> FloatTensor<Self> {
        fallback::normed::<Self>(norm, input)
    }

    /// The normed rows, what was normalised (`x + residual`, or `x`), and what the backward reads.
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

    /// The gradients, for `dy` of the normed rows and `dsum` of what was normalised.
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
