//! A residual addition fused with a norm; both results have gradients.

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::{InputGrads, MultiOutputOp, fused_outputs, optional};

use super::{NormCall, NormInput, NormInputGrads, NormRows, SavedNorm};

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
        let (y, sum, saved) = B::forward(call.norm, input);
        ([y, sum], (call, saved))
    }

    fn backward(
        (call, saved): Self::Saved,
        dys: [Option<FloatTensor<B>>; 2],
        mut grads: InputGrads<'_, B>,
    ) {
        let NormCall { norm, sums } = call;
        match dys {
            [Some(dy), dsum] => {
                let NormInputGrads { x, gamma, beta } = B::backward(norm, saved, dy, dsum, &sums);
                grads.register_all([Some(x.clone()), Some(x), gamma, beta]);
            }
            [None, dsum] => grads.register_all([dsum.clone(), dsum]),
        }
    }
}
