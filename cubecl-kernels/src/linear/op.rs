//! The linear map on a backend's primitives, with its backward.
//!
//! `dx = dy wᵀ`, `dw = xᵀ dy`, `dbias = column_sum(dy)`. The gradient of a weight or bias goes to
//! its [`MainGrad`] if that is attached, immediately or
//! [deferred](megaburn_autograd::WgradQueue::defer).

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use megaburn_autograd::backend_ops::{cast, rows};
use megaburn_autograd::{
    FusedOp, InputGrads, LinearPass, MainGrad, SavedInput, optional, read_weight, run_or_defer,
};

use super::options::LinearOptions;
use crate::bias::{ColumnSum, bias_gradient};
use crate::gemm_ops::{ProductOptions, swapped};
use crate::gradient_accumulation_fusion::GradAccumFusion;

/// The inputs are `x: [.., k]` and `w: [k, n]` (`[n, k]` with `out_in`), and optionally `bias: [n]`;
/// the result is `[.., n]`.
#[derive(Debug)]
pub(super) struct Linear(pub(super) LinearOptions);

#[derive(Clone, Debug)]
pub(super) struct SavedLinear<T> {
    x: SavedInput<T>,
    w: T,
    options: LinearOptions,
}

impl<B: GradAccumFusion + ColumnSum, const N: usize> FusedOp<B, N> for Linear {
    type Saved = SavedLinear<FloatTensor<B>>;

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let Self(mut options) = self;
        let ([x, w], [bias]) = optional(inputs);
        let mut shape = x.shape();
        let weight = read_weight::<B>(w.clone(), options.main_grad.as_ref(), LinearPass::Forward);
        let weight = if options.out_in {
            swapped::<B>(weight)
        } else {
            weight
        };
        let last = shape.num_dims() - 1;
        shape[last] = weight.shape()[1];
        let y = B::affine(rows::<B>(x.clone()), weight, bias, options.algorithm);
        let x = SavedInput::new(x, options.again.take());
        (B::float_reshape(y, shape), SavedLinear { x, w, options })
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let SavedLinear { x, w, options } = saved;
        let shape = x.shape.clone();
        let dtype = w.dtype();
        let dy = cast::<B>(rows::<B>(dy), dtype.into());
        let algorithm = options.algorithm;
        let product = ProductOptions::new(dtype).with_algorithm(algorithm);
        if grads.wants(0) {
            let w = read_weight::<B>(w, options.main_grad.as_ref(), LinearPass::Backward);
            let w = if options.out_in { w } else { swapped::<B>(w) };
            let dx = B::product(dy.clone(), w, product);
            grads.register(0, B::float_reshape(dx, shape));
        }
        if grads.wants(1) {
            let operands = {
                let dy = dy.clone();
                move || {
                    let x = x.rows::<B>();
                    if options.out_in { (dy, x) } else { (x, dy) }
                }
            };
            match options.main_grad.filter(MainGrad::is_attached) {
                Some(main_grad) => run_or_defer(move || {
                    let (inner, outer) = operands();
                    main_grad.update(|sum, room| {
                        B::add_weight_gradient(inner, outer, sum, room(), algorithm)
                    });
                }),
                None => {
                    let (inner, outer) = operands();
                    let dw = B::product(swapped::<B>(inner), outer, product);
                    grads.register(1, dw);
                }
            }
        }
        if grads.wants(2)
            && let Some(gradient) = bias_gradient::<B>(dy, dtype, options.bias_grad.as_ref())
        {
            grads.register(2, gradient);
        }
    }
}
