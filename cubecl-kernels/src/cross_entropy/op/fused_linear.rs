//! The losses of a linear map's outputs, whose backward recomputes the logits.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Int, Shape, Slice, Tensor};
use megaburn_autograd::backend_ops::{cast, compute_dtype, rows};
use megaburn_autograd::{
    FusedOp, InputGrads, IntoPrimitive, LinearPass, MainGrad, SavedInput, read_weight,
};

use super::{VocabParallelLoss, losses_of};
use crate::cross_entropy::options::CrossEntropyOptions;
use crate::cross_entropy::soft_cap::{self, capped_of};
use crate::gemm_ops::{ProductOptions, swapped};
use crate::gradient_accumulation_fusion::GradAccumFusion;
use crate::linear::LinearOptions;

/// The losses among `rows` (see [`VocabParallelLoss::combined`]) as a function of `x: [s, b, in]`
/// and the weight.
#[derive(Debug)]
pub(in crate::cross_entropy) struct LinearLosses {
    pub(in crate::cross_entropy) labels: Tensor<2, Int>,
    pub(in crate::cross_entropy) rows: Tensor<2>,
    pub(in crate::cross_entropy) how: LinearLossOptions,
}

#[derive(Clone, Debug)]
pub(in crate::cross_entropy) struct LinearLossOptions {
    pub(in crate::cross_entropy) linear: LinearOptions,
    pub(in crate::cross_entropy) options: CrossEntropyOptions,
    pub(in crate::cross_entropy) chunk: usize,
}

#[derive(Clone, Debug)]
pub(in crate::cross_entropy) struct SavedLinearLoss<F, I> {
    x: SavedInput<F>,
    w: F,
    labels: I,
    rows: F,
    how: LinearLossOptions,
}

impl<B: VocabParallelLoss + GradAccumFusion + IntoPrimitive> FusedOp<B, 2> for LinearLosses {
    type Saved = SavedLinearLoss<FloatTensor<B>, IntTensor<B>>;

    fn forward(self, [x, w]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        let mut how = self.how;
        let labels = B::unwrap_int(self.labels);
        let rows = B::unwrap(self.rows);
        let losses = losses_of::<B>(rows.clone(), labels.shape());
        let x = SavedInput::new(x, how.linear.again.take());
        let saved = SavedLinearLoss {
            x,
            w,
            labels,
            rows,
            how,
        };
        (losses, saved)
    }

    fn backward(saved: Self::Saved, grad: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let SavedLinearLoss {
            x,
            w,
            labels,
            rows: statistics,
            how,
        } = saved;
        let (shape, dtype, wide) = (x.shape.clone(), w.dtype(), compute_dtype(w.dtype()));
        let w = read_weight::<B>(w, how.linear.main_grad.as_ref(), LinearPass::Backward);
        let x = x.rows::<B>();
        let n = x.shape()[0];
        let labels = B::int_reshape(labels, Shape::from([1, n]));
        let grad = B::float_reshape(grad, Shape::from([1, n]));
        let [to_logits, to_x] = if how.linear.out_in {
            [swapped::<B>(w.clone()), w.clone()]
        } else {
            [w.clone(), swapped::<B>(w.clone())]
        };
        let algorithm = how.linear.algorithm;
        let product_to = |dtype| ProductOptions::new(dtype).with_algorithm(algorithm);
        let main_grad = how.linear.main_grad.filter(MainGrad::is_attached);
        let mut dx = Vec::new();
        let mut dw = None;
        for start in (0..n).step_by(how.chunk) {
            let these = Slice::from(start..n.min(start + how.chunk));
            let x = B::float_slice(x.clone(), &[these, Slice::full()]);
            let logits = B::affine(x.clone(), to_logits.clone(), None, algorithm);
            let [len, columns] = logits.shape().dims();
            let logits = B::float_reshape(logits, Shape::from([1, len, columns]));
            let cap = how.options.soft_cap;
            let narrow = logits.dtype();
            let capped = cap.map(|cap| capped_of::<B>(cast::<B>(logits.clone(), wide), cap));
            // Logits without a cap have no other owner, so their gradient overwrites them.
            let dy = B::logit_gradient(
                capped.clone().unwrap_or(logits),
                B::int_slice(labels.clone(), &[Slice::full(), these]),
                B::float_slice(statistics.clone(), &[Slice::full(), these]),
                B::float_slice(grad.clone(), &[Slice::full(), these]),
                how.options,
            );
            let dy = match capped.zip(cap) {
                Some((capped, cap)) => {
                    cast::<B>(soft_cap::gradient::<B>(capped, dy, cap), narrow.into())
                }
                None => dy,
            };
            let dy = rows::<B>(dy);
            if grads.wants(0) {
                dx.push(B::product(
                    dy.clone(),
                    to_x.clone(),
                    product_to(dtype.into()),
                ));
            }
            if grads.wants(1) {
                let (inner, outer) = if how.linear.out_in { (dy, x) } else { (x, dy) };
                match &main_grad {
                    Some(main_grad) => {
                        main_grad.update_by_part(|sum, room| {
                            B::add_weight_gradient(inner, outer, sum, room(), algorithm)
                        });
                    }
                    None => {
                        let part = B::product(swapped::<B>(inner), outer, product_to(wide));
                        dw = Some(match dw {
                            Some(sum) => B::float_add(sum, part),
                            None => part,
                        });
                    }
                }
            }
        }
        // Notify once, whatever the number of chunks: listeners count the gradients that they
        // expect.
        if let Some(main_grad) = main_grad.filter(|_| grads.wants(1)) {
            main_grad.notify();
        }
        if grads.wants(0) {
            grads.register(0, B::float_reshape(B::float_cat(dx, 0), shape));
        }
        if let Some(dw) = dw {
            grads.register(1, cast::<B>(dw, w.dtype().into()));
        }
    }
}
