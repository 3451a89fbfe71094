//! The losses of a linear map's outputs without materializing all of them. The logits are computed
//! in chunks of tokens: in forward for their statistics, and recomputed in backward for their
//! gradient.
//!
//! Gradients are not computed in forward, although that would save a product: only backward knows
//! the gradient of each token's loss, and whether there is a backward at all.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Int, Shape, Slice, Tensor};
use megaburn_autograd::arg_check::{self, float, int};
use megaburn_autograd::backend_ops::{cast, compute_dtype, rows};
use megaburn_autograd::{
    IntoPrimitive, LinearPass, MainGrad, SavedInput, on_every_backend, read_weight,
};

use super::op::{self, VocabParallelLoss, losses_of};
use super::{CrossEntropyOptions, exchanged};
use crate::gemm_ops::{GemmOps, swapped};
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
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    let labels = labels.into_dispatch();
    let rows = rows.into_dispatch();
    let how = LinearLossOptions {
        linear: linear_options,
        options,
        chunk,
    };
    Tensor::from_dispatch(<Dispatch as LinearLosses>::linear_losses(
        x, weight, labels, rows, how,
    ))
}

#[derive(Clone, Debug)]
pub(crate) struct LinearLossOptions {
    linear: LinearOptions,
    options: CrossEntropyOptions,
    chunk: usize,
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait LinearLosses: Backend {
    /// The losses among `rows` (see [`VocabParallelLoss::combined`]) as a function of
    /// `x: [s, b, in]` and `w`.
    fn linear_losses(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        how: LinearLossOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl LinearLosses {
        fn linear_losses(
            _x: FloatTensor<Self>,
            _w: FloatTensor<Self>,
            labels: IntTensor<Self>,
            rows: FloatTensor<Self>,
            _how: LinearLossOptions,
        ) -> FloatTensor<Self> {
            losses_of::<Self>(rows, labels.shape())
        }
    }
}

#[derive(Clone, Debug)]
struct SavedLinearLoss<F, I> {
    x: SavedInput<F>,
    w: F,
    labels: I,
    rows: F,
    how: LinearLossOptions,
}

#[derive(Debug)]
struct LinearLossesBackward;

impl<B: LinearLosses + VocabParallelLoss + GemmOps + IntoPrimitive> Backward<B, 2>
    for LinearLossesBackward
{
    type State = SavedLinearLoss<FloatTensor<B>, IntTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let SavedLinearLoss {
            x,
            w,
            labels,
            rows: statistics,
            how,
        } = ops.state;
        let [for_x, for_w] = ops.parents;
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
        let main_grad = how.linear.main_grad.filter(MainGrad::is_attached);
        let mut dx = Vec::new();
        let mut dw = None;
        for start in (0..n).step_by(how.chunk) {
            let these = Slice::from(start..n.min(start + how.chunk));
            let x = B::float_slice(x.clone(), &[these, Slice::full()]);
            let logits = B::affine(x.clone(), to_logits.clone(), None);
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
            if for_x.is_some() {
                dx.push(B::product(dy.clone(), to_x.clone(), 1.0, dtype.into()));
            }
            if for_w.is_some() {
                let (inner, outer) = if how.linear.out_in { (dy, x) } else { (x, dy) };
                match &main_grad {
                    Some(main_grad) => {
                        main_grad.update_by_part(|sum, room| {
                            B::add_weight_gradient(inner, outer, sum, room())
                        });
                    }
                    None => {
                        let part = B::product(swapped::<B>(inner), outer, 1.0, wide);
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
        if let Some(main_grad) = main_grad.filter(|_| for_w.is_some()) {
            main_grad.notify();
        }
        if let Some(node) = for_x {
            let dx = B::float_reshape(B::float_cat(dx, 0), shape);
            grads.register::<B>(node.id, dx);
        }
        if let (Some(node), Some(dw)) = (for_w, dw) {
            grads.register::<B>(node.id, cast::<B>(dw, w.dtype().into()));
        }
    }
}

impl<B, C> LinearLosses for Autodiff<B, C>
where
    B: LinearLosses + VocabParallelLoss + GemmOps + IntoPrimitive,
    C: CheckpointStrategy,
{
    fn linear_losses(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        mut how: LinearLossOptions,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (w, for_w) = w.into_parts();
        let rows = rows.into_primitive();
        let losses = losses_of::<B>(rows.clone(), labels.shape());
        match LinearLossesBackward
            .prepare::<C>([for_x, for_w])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                let x = SavedInput::new(x, how.linear.again.take());
                op.finish(
                    SavedLinearLoss {
                        x,
                        w,
                        labels,
                        rows,
                        how,
                    },
                    losses,
                )
            }
            OpsKind::UnTracked(op) => op.finish(losses),
        }
    }
}
