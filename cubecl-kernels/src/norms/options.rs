use megaburn_autograd::MainGrad;

use crate::quantized::FoundAmax;

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
    /// The largest magnitudes that the norm finds.
    pub amaxes: NormAmaxes,
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
            amaxes: NormAmaxes::default(),
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

    /// Sets the largest magnitudes that the norm finds.
    pub fn with_amaxes(mut self, amaxes: NormAmaxes) -> Self {
        self.amaxes = amaxes;
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

/// The largest magnitudes of what a norm writes, which its kernels find for the layers that quantise
/// it. With `None` they are not found.
#[derive(Clone, Debug, Default)]
pub struct NormAmaxes {
    /// That of the normalized rows.
    pub result: Option<FoundAmax>,
    /// That of the gradient of `x`, which is also the gradient of the residual. It is not found where
    /// only the sum `x + residual` has a gradient.
    pub gradient: Option<FoundAmax>,
}
