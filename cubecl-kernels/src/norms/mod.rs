//! What RMS norm and layer norm share: one operation with options, composed of primitives on CPUs
//! and of kernels of its own on GPUs.

mod add;
mod composed;
#[cfg(feature = "cuda")]
mod cube;
#[cfg(feature = "cuda")]
mod kernels;
mod op;
mod options;

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

pub(crate) use add::norm_add;
pub(crate) use op::NormOps;
pub use options::NormOptions;
pub(crate) use options::check;

/// Which norm, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    /// Layer norm: the mean is subtracted.
    pub(crate) centered: bool,
    pub(crate) options: NormOptions,
}

/// What is normalised.
///
/// # Shapes
/// `x`, `residual`: `[.., n]`; `gamma`, `beta`: `[n]`
#[derive(Clone, Debug)]
pub(crate) struct Input<T> {
    pub(crate) x: T,
    /// Added to `x` first.
    pub(crate) residual: Option<T>,
    pub(crate) gamma: T,
    pub(crate) beta: Option<T>,
}

#[cfg(feature = "cuda")]
impl<T> Input<T> {
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> Input<U> {
        let Self { x, residual, gamma, beta } = self;
        let [x, gamma] = [x, gamma].map(&mut f);
        let [residual, beta] = [residual, beta].map(|t| t.map(&mut f));
        Input { x, residual, gamma, beta }
    }
}

/// What the backward reads.
#[derive(Clone, Debug)]
pub(crate) struct Saved<T> {
    /// The normalised rows in the compute dtype where they are composed, `[rows, n]`; the input of
    /// the norm where a kernel computes them again.
    pub(crate) x: T,
    /// Means of rows, where `x` is the input of a layer norm.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only kernels read it"))]
    pub(crate) mean: Option<T>,
    /// What rows were divided by, or the inverse where `x` is the input. `[rows, 1]`
    pub(crate) deviation: T,
    pub(crate) gamma: T,
    /// The dtype of beta, if there is one.
    pub(crate) beta: Option<DType>,
    /// The dtype of the input.
    pub(crate) dtype: DType,
}

#[cfg(feature = "cuda")]
impl<T> Saved<T> {
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> Saved<U> {
        let Self { x, mean, deviation, gamma, beta, dtype } = self;
        let [x, deviation, gamma] = [x, deviation, gamma].map(&mut f);
        Saved { x, mean: mean.map(f), deviation, gamma, beta, dtype }
    }
}

/// Gradients, each in the dtype of what it is of.
pub(crate) struct Grads<T> {
    /// Of `x`, and of the residual too.
    pub(crate) x: T,
    pub(crate) gamma: T,
    pub(crate) beta: Option<T>,
}

/// A norm, as each backend computes it best.
pub(crate) trait NormRows: Backend {
    /// The normed rows, for which no gradient is asked.
    fn normed(norm: Norm, input: Input<FloatTensor<Self>>) -> FloatTensor<Self> {
        composed::normed::<Self>(norm, input)
    }

    /// The normed rows, what was normalised (`x + residual`, or `x`), and what the backward reads.
    fn forward(
        norm: Norm,
        input: Input<FloatTensor<Self>>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, Saved<FloatTensor<Self>>) {
        composed::forward::<Self>(norm, input)
    }

    /// The gradients, for `dy` of the normed rows and `dsum` of what was normalised.
    fn backward(
        norm: Norm,
        saved: Saved<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        dsum: Option<FloatTensor<Self>>,
    ) -> Grads<FloatTensor<Self>> {
        composed::backward::<Self>(norm, saved, dy, dsum)
    }
}

#[cfg(feature = "flex")]
impl NormRows for burn::backend::Flex {}
