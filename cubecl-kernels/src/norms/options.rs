use burn::tensor::Tensor;
use megaburn_autograd::MainGrad;
use megaburn_autograd::arg_check::{self, float};

use super::NormCall;

/// How rows are normalized. A plain `f64` converts to options with that `epsilon`.
#[derive(Clone, Debug)]
pub struct NormOptions {
    /// Added to the mean square or variance.
    pub epsilon: f64,
    /// Whether rows are scaled by `1 + gamma` (Megatron's `layernorm_zero_centered_gamma`, Gemma's
    /// norm).
    pub zero_centered_gamma: bool,
    /// The destinations of the gradients of gamma and beta.
    pub main_grads: NormGrads,
}

/// The options that affect the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Formula {
    pub(crate) epsilon: f64,
    pub(crate) zero_centered_gamma: bool,
}

impl NormOptions {
    /// Options with this `epsilon`, where rows are scaled by `gamma`.
    pub fn new(epsilon: f64) -> Self {
        Self {
            epsilon,
            zero_centered_gamma: false,
            main_grads: NormGrads::default(),
        }
    }

    /// Sets whether rows are scaled by `1 + gamma`.
    pub fn with_zero_centered_gamma(mut self, zero_centered_gamma: bool) -> Self {
        self.zero_centered_gamma = zero_centered_gamma;
        self
    }

    /// Sets the destinations of the gradients of gamma and beta.
    pub fn with_main_grads(mut self, main_grads: NormGrads) -> Self {
        self.main_grads = main_grads;
        self
    }
}

impl From<f64> for NormOptions {
    fn from(epsilon: f64) -> Self {
        Self::new(epsilon)
    }
}

/// The main gradients that accumulate the gradients of a norm's gamma and beta as `[1, n]`, once
/// attached. With `None` the gradient is an ordinary one.
#[derive(Clone, Debug, Default)]
pub struct NormGrads {
    /// The main gradient of gamma.
    pub gamma: Option<MainGrad>,
    /// The main gradient of beta.
    pub beta: Option<MainGrad>,
}

/// Panics unless rows of `x` can be normalized with these vectors and options.
pub(crate) fn check<const D: usize>(
    op: &str,
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    beta: Option<&Tensor<1>>,
    NormCall { norm, sums }: &NormCall,
) {
    let epsilon = norm.options.epsilon;
    let vectors = [("gamma", Some(gamma)), ("beta", beta)];
    let vectors = vectors
        .into_iter()
        .filter_map(|(name, vector)| Some((name, vector?)));
    let others = vectors.clone().map(|(name, vector)| float(name, vector));
    arg_check::check(op, [float("x", x)].into_iter().chain(others));
    let n = x.dims()[D - 1];
    assert!(n > 0, "{op}: x is {:?}, its rows are empty", x.dims());
    for (name, vector) in vectors {
        let [length] = vector.dims();
        assert_eq!(
            n, length,
            "{op}: {name} has {length} elements, but rows have {n}"
        );
    }
    for main_grad in [&sums.gamma, &sums.beta].into_iter().flatten() {
        main_grad.check(op, [1, n]);
    }
    assert!(
        epsilon >= 0.0 && epsilon.is_finite(),
        "{op}: epsilon {epsilon} is not a finite number of at least 0"
    );
}
