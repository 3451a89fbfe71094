//! Norms under automatic differentiation.

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::{FusedOp, InputGrads, fused, optional};

use super::{NormCall, NormInput, NormInputGrads, NormRows, SavedNorm};

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
        let (y, _, saved) = B::forward(self.norm, input(inputs));
        (y, (self, saved))
    }

    fn infer(self, inputs: [FloatTensor<B>; N]) -> FloatTensor<B> {
        B::normed(self.norm, input(inputs))
    }

    fn backward((call, saved): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let NormCall { norm, sums } = call;
        let NormInputGrads { x, gamma, beta } = B::backward(norm, saved, dy, None, &sums);
        grads.register_all([Some(x), gamma, beta]);
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
