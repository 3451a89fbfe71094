//! The losses of a linear map's outputs without materializing all of them. The logits are computed
//! in chunks of tokens: in forward for their statistics, and recomputed in backward for their
//! gradient.
//!
//! Gradients are not computed in forward, although that would save a product: only backward knows
//! the gradient of each token's loss, and whether there is a backward at all.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{Int, Shape, Slice, Tensor};
use megaburn_autograd::arg_check::{self, float, int};
use megaburn_autograd::backend_ops::{cast, compute_dtype, rows};
use megaburn_autograd::{
    FusedOp, InputGrads, IntoPrimitive, LinearPass, MainGrad, SavedInput, fused, read_weight,
};

use super::op::{self, VocabParallelLoss, losses_of};
use super::{CrossEntropyOptions, exchanged};
use crate::gemm_ops::{GemmOps, ProductOptions, swapped};
use crate::{LinearOptions, linear};

/// [`cross_entropy`](crate::cross_entropy) of `linear(x, weight)`, in chunks of at most `chunk`
/// tokens: never more than one chunk of the logits and their gradient is in memory. Backward
/// recomputes each chunk's logits.
///
/// # Shapes
/// - `x`: `[s, b, in]`; `weight`: as in [`linear`], whose outputs are the columns of this part
/// - labels, result: `[s, b]`; `exchange`: `[1, 4, s * b]` to `[parts, 4, s * b]`
///
/// # Panics
/// As [`linear`] and [`cross_entropy`](crate::cross_entropy); if `chunk` is 0, or there is no
/// token.
pub fn linear_cross_entropy(
    x: Tensor<3>,
    weight: Tensor<2>,
    labels: Tensor<2, Int>,
    linear_options: LinearOptions,
    options: CrossEntropyOptions,
    chunk: usize,
    exchange: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<2> {
    let name = "linear_cross_entropy";
    assert!(chunk > 0, "{name}: the chunk size must be at least 1 token");
    let [s, b, inputs] = x.dims();
    let labels = labels.inner();
    let num_rows = s * b;
    assert!(
        num_rows > 0,
        "{name}: x is [{s}, {b}, {inputs}] and has no tokens"
    );
    let columns = weight.dims()[if linear_options.out_in { 0 } else { 1 }];
    arg_check::check(
        name,
        [
            float("x", &x),
            float("the weight", &weight),
            int("labels", &labels),
        ],
    );
    options.check(name, [s, b, columns], labels.dims());
    if let Some(main_grad) = &linear_options.main_grad {
        main_grad.check(name, weight.dims());
        main_grad.notify_use();
    }
    let all = x.clone().inner().reshape([1, num_rows, inputs]);
    let by_row = labels.clone().reshape([1, num_rows]);
    let plain = LinearOptions {
        out_in: linear_options.out_in,
        algorithm: linear_options.algorithm,
        ..Default::default()
    };
    let main_grad = linear_options.main_grad.as_ref();
    let whole = main_grad.and_then(|main_grad| main_grad.weight(LinearPass::Forward));
    let whole = whole.unwrap_or_else(|| weight.clone().inner());
    let statistics = (0..num_rows).step_by(chunk).map(|start| {
        let len = chunk.min(num_rows - start);
        let x = all.clone().narrow(1, start, len);
        let logits = linear(x, whole.clone(), None, plain.clone());
        op::statistics(logits, by_row.clone().narrow(1, start, len), options)
    });
    let statistics = Tensor::cat(statistics.collect(), 2);
    let statistics = exchanged(name, statistics, exchange, columns, options);
    let rows = op::combined(statistics, labels.clone(), columns, options);
    let losses = LinearLosses {
        labels,
        rows,
        how: LinearLossOptions {
            linear: linear_options,
            options,
            chunk,
        },
    };
    fused(losses, [x.into_dispatch(), weight.into_dispatch()])
}

/// The losses among `rows` (see [`VocabParallelLoss::combined`]) as a function of `x: [s, b, in]`
/// and the weight.
#[derive(Debug)]
struct LinearLosses {
    labels: Tensor<2, Int>,
    rows: Tensor<2>,
    how: LinearLossOptions,
}

#[derive(Clone, Debug)]
struct LinearLossOptions {
    linear: LinearOptions,
    options: CrossEntropyOptions,
    chunk: usize,
}

#[derive(Clone, Debug)]
struct SavedLinearLoss<F, I> {
    x: SavedInput<F>,
    w: F,
    labels: I,
    rows: F,
    how: LinearLossOptions,
}

impl<B: VocabParallelLoss + GemmOps + IntoPrimitive> FusedOp<B, 2> for LinearLosses {
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
            // These logits have no other owner, so their gradient overwrites them.
            let dy = B::logit_gradient(
                B::float_reshape(logits, Shape::from([1, len, columns])),
                B::int_slice(labels.clone(), &[Slice::full(), these]),
                B::float_slice(statistics.clone(), &[Slice::full(), these]),
                B::float_slice(grad.clone(), &[Slice::full(), these]),
                how.options,
            );
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
