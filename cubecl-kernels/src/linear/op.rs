//! The linear map on a backend's primitives, with its backward.
//!
//! `dx = dy wᵀ`, `dw = xᵀ dy`, `dbias = column_sum(dy)`. The gradient of a weight or bias goes to
//! its [`MainGrad`] if that is attached, immediately or [deferred](megaburn_autograd::WgradQueue::defer).

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use megaburn_autograd::backend_ops::{cast, rows};
use megaburn_autograd::{
    IntoPrimitive, LinearPass, MainGrad, SavedInput, on_every_backend, read_weight, run_or_defer,
};

use super::LinearOptions;
use crate::bias::{ColumnSum, bias_gradient};
use crate::gemm_ops::{GemmOps, swapped};

// (`linear` is a method of Burn's `ModuleOps`, and the macro takes no optional tensors.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait LinearOps: Backend {
    /// `x: [.., k]`, `w: [k, n]` (`[n, k]` with `out_in`) to `[.., n]`.
    fn linear_map(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        options: LinearOptions,
    ) -> FloatTensor<Self>;

    /// [`linear_map`](Self::linear_map) plus `bias: [n]`.
    fn affine_map(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: LinearOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl LinearOps {
        fn linear_map(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            options: LinearOptions,
        ) -> FloatTensor<Self> {
            forward::<Self>(x, w, None, &options)
        }

        fn affine_map(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            bias: FloatTensor<Self>,
            options: LinearOptions,
        ) -> FloatTensor<Self> {
            forward::<Self>(x, w, Some(bias), &options)
        }
    }
}

fn forward<B: GemmOps + IntoPrimitive>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    options: &LinearOptions,
) -> FloatTensor<B> {
    let mut shape = x.shape();
    let w = read_weight::<B>(w, options.main_grad.as_ref(), LinearPass::Forward);
    let w = if options.out_in { swapped::<B>(w) } else { w };
    let last = shape.num_dims() - 1;
    shape[last] = w.shape()[1];
    B::float_reshape(B::affine(rows::<B>(x), w, bias), shape)
}

#[derive(Clone, Debug)]
struct SavedLinear<T> {
    x: SavedInput<T>,
    w: T,
    options: LinearOptions,
}

impl<T: TensorMetadata> SavedLinear<T> {
    fn new(x: T, w: T, mut options: LinearOptions) -> Self {
        Self {
            x: SavedInput::new(x, options.again.take()),
            w,
            options,
        }
    }
}

/// Registers the gradients of `x` and `w`; returns `dy` as `[rows, n]`.
fn register<B: GemmOps + IntoPrimitive>(
    dy: FloatTensor<B>,
    saved: SavedLinear<FloatTensor<B>>,
    [for_x, for_w]: [Option<NodeId>; 2],
    grads: &mut Gradients,
) -> FloatTensor<B> {
    let SavedLinear { x, w, options } = saved;
    let shape = x.shape.clone();
    let dtype = w.dtype();
    let dy = cast::<B>(rows::<B>(dy), dtype.into());
    if let Some(id) = for_x {
        let w = read_weight::<B>(w.clone(), options.main_grad.as_ref(), LinearPass::Backward);
        let w = if options.out_in { w } else { swapped::<B>(w) };
        let dx = B::product(dy.clone(), w, 1.0, dtype.into());
        grads.register::<B>(id, B::float_reshape(dx, shape));
    }
    if let Some(id) = for_w {
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
                main_grad.update(|sum, room| B::add_weight_gradient(inner, outer, sum, room()));
            }),
            None => {
                let (inner, outer) = operands();
                let dw = B::product(swapped::<B>(inner), outer, 1.0, w.dtype().into());
                grads.register::<B>(id, dw);
            }
        }
    }
    dy
}

#[derive(Debug)]
struct LinearBackward;

impl<B: LinearOps + GemmOps + IntoPrimitive> Backward<B, 2> for LinearBackward {
    type State = SavedLinear<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        register::<B>(
            dy,
            ops.state,
            ops.parents.map(|node| node.map(|node| node.id)),
            grads,
        );
    }
}

#[derive(Debug)]
struct AffineBackward;

impl<B: LinearOps + GemmOps + ColumnSum> Backward<B, 3> for AffineBackward {
    type State = SavedLinear<FloatTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [for_x, for_w, for_bias] = ops.parents.map(|node| node.map(|node| node.id));
        let dy = grads.consume::<B>(&ops.node);
        let dtype = ops.state.w.dtype();
        let bias_grad = ops.state.options.bias_grad.clone();
        let dy = register::<B>(dy, ops.state, [for_x, for_w], grads);
        if let Some(id) = for_bias
            && let Some(gradient) = bias_gradient::<B>(dy, dtype, bias_grad.as_ref())
        {
            grads.register::<B>(id, gradient);
        }
    }
}

impl<B: LinearOps + GemmOps + ColumnSum, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn linear_map(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        options: LinearOptions,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (w, for_w) = w.into_parts();
        match LinearBackward
            .prepare::<C>([for_x, for_w])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                let y = forward::<B>(x.clone(), w.clone(), None, &options);
                op.finish(SavedLinear::new(x, w, options), y)
            }
            OpsKind::UnTracked(op) => op.finish(B::linear_map(x, w, options)),
        }
    }

    fn affine_map(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        options: LinearOptions,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (w, for_w) = w.into_parts();
        let (bias, for_bias) = bias.into_parts();
        match AffineBackward
            .prepare::<C>([for_x, for_w, for_bias])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                let y = forward::<B>(x.clone(), w.clone(), Some(bias), &options);
                op.finish(SavedLinear::new(x, w, options), y)
            }
            OpsKind::UnTracked(op) => op.finish(B::affine_map(x, w, bias, options)),
        }
    }
}
