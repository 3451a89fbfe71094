//! What routing takes and returns, besides its options.

use burn::tensor::{Int, Tensor};

/// The routing of tokens to experts.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The weight of each token's experts, `[t, k]` in f32; differentiable with respect to the
    /// logits.
    pub weights: Tensor<2>,
    /// The experts of each token, best first, `[t, k]` in i32, off the autodiff device.
    pub experts: Tensor<2, Int>,
    /// The scores of all experts, `[t, e]` in f32, off the autodiff device.
    pub scores: Tensor<2>,
}

/// Gradients that the backward pass from weights to logits adds: those of losses that are not part
/// of the summed loss (Megatron's `MoEAuxLossAutoScaler`). Each is `[t, e]` or broadcastable to it,
/// off the autodiff device.
#[derive(Clone, Debug, Default)]
pub struct RouterGradients {
    /// The gradient of the scores.
    pub of_scores: Option<Tensor<2>>,
    /// The gradient of the logits.
    pub of_logits: Option<Tensor<2>>,
}

/// How experts are chosen.
pub(super) enum ExpertChoice {
    /// By the best scores, plus a bias if there is one.
    Best(Option<Tensor<1>>),
    Given(Tensor<2, Int>),
}

/// The tensors from which the gradient of the logits is computed.
pub(super) struct Chosen {
    pub(super) dweights: Tensor<2>,
    pub(super) experts: Tensor<2, Int>,
    pub(super) scores: Tensor<2>,
}
