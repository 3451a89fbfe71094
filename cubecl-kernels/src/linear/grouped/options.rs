use burn::tensor::Tensor;
use megaburn_autograd::{MainGrad, OverlappedWgrads, RecomputeFn};

use super::choice::GroupedGemmChoice;

/// One of the matrices of [`grouped_linear`](crate::grouped_linear), and where its gradient goes.
#[derive(Clone, Debug)]
pub struct GroupWeight {
    /// `[in, out]`
    pub weight: Tensor<2>,
    /// Accumulates the weight's gradient once attached; `None` gives an ordinary gradient.
    pub main_grad: Option<MainGrad>,
}

/// Options of [`grouped_linear`](crate::grouped_linear).
#[derive(Clone, Debug, Default)]
pub struct GroupedOptions {
    /// Recomputes all of `x`, as [`LinearOptions::again`](crate::LinearOptions::again).
    pub again: Option<RecomputeFn>,
    /// Where weight-gradient products that go to a [`MainGrad`] are queued; `None` computes them
    /// immediately.
    pub overlapped_wgrads: Option<OverlappedWgrads>,
    /// How the products are computed on a GPU.
    pub choice: GroupedGemmChoice,
}
