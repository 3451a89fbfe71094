//! Norms, and norms of sums, under automatic differentiation.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor};
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::{FusedOp, InputGrads, MultiOutputOp, fused, fused_outputs, optional};

use super::options::{Formula, NormAmaxes, NormGrads, NormOptions};
use crate::bias::ColumnSum;
use crate::quantized::FoundAmax;
use crate::quantized::operands::QuantizedOps;

/// Which norm is computed, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Norm {
    /// Whether the mean is subtracted (layer norm).
    pub(crate) centered: bool,
    pub(crate) options: Formula,
    /// Whether the bits equal those under autodiff even when there is no autodiff.
    pub(crate) bit_exact_with_training: bool,
}

/// A norm, where the gradients of its gamma and beta go, and which largest magnitudes it finds.
#[derive(Clone, Debug)]
pub(crate) struct NormCall {
    pub(crate) norm: Norm,
    pub(crate) sums: NormGrads,
    pub(crate) amaxes: NormAmaxes,
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
            amaxes,
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
            amaxes,
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
    pub(super) fn map<U>(self, mut f: impl FnMut(T) -> U) -> NormInput<U> {
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
    /// `[rows, 1]`: the fallback saves each row's divisor, `std = sqrt(var + epsilon)` (in RMS norm
    /// the root mean square); the kernels save `rstd = 1 / std`.
    pub(crate) std_or_rstd: T,
    pub(crate) gamma: T,
    /// The dtype of beta, if there is one.
    pub(crate) beta: Option<DType>,
    /// The dtype of the input.
    pub(crate) dtype: DType,
}

#[cfg(feature = "cuda")]
impl<T> SavedNorm<T> {
    pub(super) fn map<U>(self, mut f: impl FnMut(T) -> U) -> SavedNorm<U> {
        let Self {
            x,
            mean,
            std_or_rstd,
            gamma,
            beta,
            dtype,
        } = self;
        let [x, std_or_rstd, gamma] = [x, std_or_rstd, gamma].map(&mut f);
        SavedNorm {
            x,
            mean: mean.map(f),
            std_or_rstd,
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
    /// The largest magnitude of the gradient of `x`, `[1]` in f32, if it was to be found.
    pub(crate) amax: Option<T>,
}

/// The result of a norm under autodiff.
pub(crate) struct Normed<T> {
    /// The normalized rows.
    pub(crate) y: T,
    /// The norm's input: `x + residual`, or `x`.
    pub(crate) sum: T,
    pub(crate) saved: SavedNorm<T>,
    /// The largest magnitude of the normalized rows, `[1]` in f32, if it was to be found.
    pub(crate) amax: Option<T>,
}

/// A norm and its backward pass, with the best implementation per backend.
pub(crate) trait NormRows: ColumnSum + QuantizedOps {
    /// Returns the normalized rows, without saving anything for backward, and with `finds_amax` their
    /// largest magnitude.
    fn normed(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
        finds_amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);

    /// Computes the norm and what is saved for backward.
    fn forward(
        norm: Norm,
        input: NormInput<FloatTensor<Self>>,
        finds_amax: bool,
    ) -> Normed<FloatTensor<Self>>;

    /// Computes the gradients from `dy` of the normalized rows and `dsum` of the norm's input.
    fn backward(
        norm: Norm,
        saved: SavedNorm<FloatTensor<Self>>,
        dy: FloatTensor<Self>,
        dsum: Option<FloatTensor<Self>>,
        sums: &NormGrads,
        finds_amax: bool,
    ) -> NormInputGrads<FloatTensor<Self>>;
}

/// The norm of `x`, whose arguments were checked.
pub(crate) fn norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    call: NormCall,
) -> Tensor<D> {
    let x = x.into_dispatch();
    let gamma = gamma.into_dispatch();
    match beta {
        Some(beta) => fused(call, [x, gamma, beta.into_dispatch()]),
        None => fused(call, [x, gamma]),
    }
}

/// The inputs are `x: [.., n]` and `gamma: [n]`, and optionally `beta: [n]`.
impl<B: NormRows, const N: usize> FusedOp<B, N> for NormCall {
    type Saved = (NormCall, SavedNorm<FloatTensor<B>>);

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let Normed { y, saved, .. } = self.normed::<B>(input(inputs));
        (y, (self, saved))
    }

    fn infer(self, inputs: [FloatTensor<B>; N]) -> FloatTensor<B> {
        let found = self.amaxes.result.as_ref();
        let (y, amax) = B::normed(self.norm, input(inputs), found.is_some());
        put::<B>(found, amax);
        y
    }

    fn backward((call, saved): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let NormInputGrads { x, gamma, beta, .. } = call.gradients::<B>(saved, dy, None);
        grads.register_all([Some(x), gamma, beta]);
    }
}

impl NormCall {
    /// The norm, whose largest magnitude is put where it is wanted.
    fn normed<B: NormRows>(&self, input: NormInput<FloatTensor<B>>) -> Normed<FloatTensor<B>> {
        let found = self.amaxes.result.as_ref();
        let mut normed = B::forward(self.norm, input, found.is_some());
        put::<B>(found, normed.amax.take());
        normed
    }

    /// The gradients. The largest magnitude of that of `x` is put where it is wanted.
    fn gradients<B: NormRows>(
        &self,
        saved: SavedNorm<FloatTensor<B>>,
        dy: FloatTensor<B>,
        dsum: Option<FloatTensor<B>>,
    ) -> NormInputGrads<FloatTensor<B>> {
        let found = self.amaxes.gradient.as_ref();
        let mut grads = B::backward(self.norm, saved, dy, dsum, &self.sums, found.is_some());
        put::<B>(found, grads.amax.take());
        grads
    }
}

/// Puts a largest magnitude where it is wanted.
fn put<B: NormRows>(found: Option<&FoundAmax>, amax: Option<FloatTensor<B>>) {
    if let (Some(found), Some(amax)) = (found, amax) {
        found.put::<B>(amax);
    }
}

fn input<T, const N: usize>(inputs: [T; N]) -> NormInput<T> {
    let ([x, gamma], [beta]) = optional(inputs);
    NormInput {
        x,
        residual: None,
        gamma,
        beta,
    }
}

/// Returns `norm(x + residual)` and `x + residual`.
pub(crate) fn norm_add<const D: usize>(
    name: &str,
    [x, residual]: [Tensor<D>; 2],
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    call: NormCall,
) -> (Tensor<D>, Tensor<D>) {
    let [(shape, dtype), other] = [&x, &residual].map(|t| (t.dims(), t.dtype()));
    assert_eq!(
        (shape, dtype),
        other,
        "{name}: the shapes or dtypes of x and the residual differ"
    );
    arg_check::check(name, [float("x", &x), float("the residual", &residual)]);
    let [x, residual] = [x, residual].map(Tensor::into_dispatch);
    let gamma = gamma.into_dispatch();
    let [y, sum] = match beta {
        Some(beta) => fused_outputs(AddNorm(call), [x, residual, gamma, beta.into_dispatch()]),
        None => fused_outputs(AddNorm(call), [x, residual, gamma]),
    };
    (y, sum)
}

/// The norm of a sum, and the sum. The inputs are `x` and the residual, `[.., n]`, and `gamma: [n]`,
/// and optionally `beta: [n]`.
#[derive(Debug)]
struct AddNorm(NormCall);

impl<B: NormRows, const N: usize> MultiOutputOp<B, N, 2> for AddNorm {
    type Saved = (NormCall, SavedNorm<FloatTensor<B>>);

    fn forward(self, inputs: [FloatTensor<B>; N]) -> ([FloatTensor<B>; 2], Self::Saved) {
        let Self(call) = self;
        let ([x, residual, gamma], [beta]) = optional(inputs);
        let input = NormInput {
            x,
            residual: Some(residual),
            gamma,
            beta,
        };
        let Normed { y, sum, saved, .. } = call.normed::<B>(input);
        ([y, sum], (call, saved))
    }

    fn backward(
        (call, saved): Self::Saved,
        dys: [Option<FloatTensor<B>>; 2],
        mut grads: InputGrads<'_, B>,
    ) {
        match dys {
            [Some(dy), dsum] => {
                let NormInputGrads { x, gamma, beta, .. } = call.gradients::<B>(saved, dy, dsum);
                grads.register_all([Some(x.clone()), Some(x), gamma, beta]);
            }
            [None, dsum] => grads.register_all([dsum.clone(), dsum]),
        }
    }
}
