use burn::tensor::Tensor;
use megaburn_autograd::{MainGrad, OverlappedWgrads, RecomputeFn};

use super::choice::GroupedGemmChoice;
use crate::quantized::LinearQuantization;

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
    /// How the products are computed on a GPU. Quantised ones are computed one by one.
    pub choice: GroupedGemmChoice,
    /// How each matrix is quantised for its products, with its rows and their gradients; empty
    /// multiplies them as they are. The recipes are equal. The sources of the input's and the
    /// gradient's largest magnitudes are used for all matrices together: a
    /// [reduction](crate::AmaxReduction), that of the first one, gets a number for each matrix.
    pub quantizations: Vec<LinearQuantization>,
}
