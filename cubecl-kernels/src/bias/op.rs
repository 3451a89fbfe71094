//! Adds a vector to each row, under automatic differentiation.
//!
//! The gradient of the rows is the gradient of the result, unchanged; the gradient of the addend is
//! the sum over the rows it was added to. (Burn's own broadcast addition sums with a generic
//! reduction kernel, which takes many times as long on a GPU.)

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, Shape};
use megaburn_autograd::backend_ops::{cast, compute_dtype, last_dim};
use megaburn_autograd::{MainGrad, on_every_backend};

use super::column_sum::{ColumnSum, bias_gradient};

/// How an addend is added to rows, apart from its values.
#[derive(Clone, Debug)]
pub(crate) struct Addend {
    /// The number of rows of the addend. The rows of `x` are split into as many equal ranges, one
    /// per row of the addend.
    pub(super) groups: usize,
    /// The main gradient that accumulates the addend's gradient, once attached; for a single row
    /// only.
    pub(super) main_grad: Option<MainGrad>,
}

/// Adds an addend to rows, with the best implementation per backend.
pub(crate) trait AddToRows: ColumnSum {
    /// # Shapes
    /// `x`, result: `[.., n]`; `addend`: `groups * n` elements
    fn add_to_rows(
        x: FloatTensor<Self>,
        addend: FloatTensor<Self>,
        groups: usize,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl AddToRows for burn::backend::Flex {
    fn add_to_rows(
        x: FloatTensor<Self>,
        addend: FloatTensor<Self>,
        groups: usize,
    ) -> FloatTensor<Self> {
        add_to_rows::<Self>(x, addend, groups)
    }
}

pub(super) fn add_to_rows<B: Backend>(
    x: FloatTensor<B>,
    addend: FloatTensor<B>,
    groups: usize,
) -> FloatTensor<B> {
    let shape = x.shape();
    let dtype = x.dtype();
    if shape.num_elements() == 0 {
        return x;
    }
    let n = last_dim(&shape);
    let wide = compute_dtype(dtype);
    let each = shape.num_elements() / (groups * n);
    let x = B::float_reshape(cast::<B>(x, wide), Shape::from([groups, each, n]));
    let addend = B::float_reshape(cast::<B>(addend, wide), Shape::from([groups, 1, n]));
    B::float_reshape(cast::<B>(B::float_add(x, addend), dtype.into()), shape)
}

#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait AddOps: Backend {
    /// `x: [.., n]`; `values` are the values of the addend.
    fn rows_plus(
        x: FloatTensor<Self>,
        values: FloatTensor<Self>,
        addend: Addend,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl AddOps {
        fn rows_plus(
            x: FloatTensor<Self>,
            values: FloatTensor<Self>,
            addend: Addend,
        ) -> FloatTensor<Self> {
            Self::add_to_rows(x, values, addend.groups)
        }
    }
}

#[derive(Clone, Debug)]
struct SavedAddend {
    addend: Addend,
    shape: Shape,
    dtype: DType,
}

#[derive(Debug)]
struct AddBackward;

impl<B: AddOps + AddToRows> Backward<B, 2> for AddBackward {
    type State = SavedAddend;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let SavedAddend {
            addend: Addend { groups, main_grad },
            shape,
            dtype,
        } = ops.state;
        let [for_x, for_addend] = ops.parents.map(|node| node.map(|node| node.id));
        if let Some(id) = for_addend {
            let gradient = match groups {
                1 => bias_gradient::<B>(dy.clone(), dtype, main_grad.as_ref()),
                _ => Some(B::column_sum(dy.clone(), groups, dtype)),
            };
            if let Some(gradient) = gradient {
                grads.register::<B>(id, B::float_reshape(gradient, shape));
            }
        }
        if let Some(id) = for_x {
            grads.register::<B>(id, dy);
        }
    }
}

impl<B: AddOps + AddToRows, C: CheckpointStrategy> AddOps for Autodiff<B, C> {
    fn rows_plus(
        x: FloatTensor<Self>,
        values: FloatTensor<Self>,
        addend: Addend,
    ) -> FloatTensor<Self> {
        let (x, for_x) = x.into_parts();
        let (values, for_values) = values.into_parts();
        let shape = values.shape();
        let dtype = values.dtype();
        let y = B::rows_plus(x, values, addend.clone());
        match AddBackward
            .prepare::<C>([for_x, for_values])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => op.finish(
                SavedAddend {
                    addend,
                    shape,
                    dtype,
                },
                y,
            ),
            OpsKind::UnTracked(op) => op.finish(y),
        }
    }
}
