/// How rows are normalised. A number is its `epsilon`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormOptions {
    /// Added to the mean square or variance.
    pub epsilon: f64,
    /// Rows are scaled by `1 + gamma` (Megatron's `layernorm_zero_centered_gamma`, Gemma's norm).
    pub zero_centered_gamma: bool,
}

impl NormOptions {
    /// Rows are scaled by `gamma`.
    pub fn new(epsilon: f64) -> Self {
        Self { epsilon, zero_centered_gamma: false }
    }

    /// Whether rows are scaled by `1 + gamma`.
    pub fn with_zero_centered_gamma(mut self, zero_centered_gamma: bool) -> Self {
        self.zero_centered_gamma = zero_centered_gamma;
        self
    }
}

impl From<f64> for NormOptions {
    fn from(epsilon: f64) -> Self {
        Self::new(epsilon)
    }
}
