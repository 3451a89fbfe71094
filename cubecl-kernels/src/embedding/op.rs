//! Embedding lookup under automatic differentiation.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, Shape};
use megaburn_autograd::backend_ops::{cast, compute_dtype, last_dim, rows};
use megaburn_autograd::{IntoPrimitive, LinearPass, MainGrad, on_every_backend, read_weight};

use super::EmbeddingOptions;
use super::rows::{Rows, Tokens};

// (The method cannot be called `embedding`: Burn's `ModuleOps` has a method of that name.)
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
pub(crate) trait EmbeddingOps: Backend {
    /// `table: [rows, d]`, `ids: [s, b]` to `[s, b, d]`.
    fn token_vectors(
        table: FloatTensor<Self>,
        ids: IntTensor<Self>,
        options: EmbeddingOptions,
    ) -> FloatTensor<Self>;
}

on_every_backend! {
    impl EmbeddingOps {
        fn token_vectors(
            table: FloatTensor<Self>,
            ids: IntTensor<Self>,
            options: EmbeddingOptions,
        ) -> FloatTensor<Self> {
            forward::<Self>(table, ids, &options)
        }
    }
}

fn flat<B: Backend>(ids: IntTensor<B>, options: &EmbeddingOptions) -> Tokens<IntTensor<B>> {
    let n = ids.shape().num_elements();
    Tokens {
        ids: B::int_reshape(ids, Shape::from([n])),
        first: options.first,
    }
}

fn forward<B: Rows + IntoPrimitive>(
    table: FloatTensor<B>,
    ids: IntTensor<B>,
    options: &EmbeddingOptions,
) -> FloatTensor<B> {
    let [s, b] = ids.shape().dims();
    let d = last_dim(&table.shape());
    let table = read_weight::<B>(table, options.main_grad.as_ref(), LinearPass::Forward);
    let vectors = B::take_rows(table, flat::<B>(ids, options));
    B::float_reshape(vectors, Shape::from([s, b, d]))
}

#[derive(Clone, Debug)]
struct SavedIds<I> {
    ids: I,
    num_rows: usize,
    dtype: DType,
    options: EmbeddingOptions,
}

#[derive(Debug)]
struct EmbeddingBackward;

impl<B: EmbeddingOps + Rows + IntoPrimitive> Backward<B, 1> for EmbeddingBackward {
    type State = SavedIds<IntTensor<B>>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let SavedIds {
            ids,
            num_rows,
            dtype,
            options,
        } = ops.state;
        let dy = rows::<B>(grads.consume::<B>(&ops.node));
        let [parent] = ops.parents;
        let Some(node) = parent else { return };
        let shape = Shape::from([num_rows, last_dim(&dy.shape())]);
        let device = dy.device();
        let zeros = |dtype| B::float_zeros(shape.clone(), &device, dtype);
        let tokens = flat::<B>(ids, &options);
        match options.main_grad.filter(MainGrad::is_attached) {
            Some(main_grad) => main_grad.update(|sum, _| {
                let sum = sum.map_or_else(|| zeros(FloatDType::F32), B::unwrap);
                B::wrap(B::add_rows(dy, tokens, sum))
            }),
            None => {
                let sum = B::add_rows(dy, tokens, zeros(compute_dtype(dtype)));
                grads.register::<B>(node.id, cast::<B>(sum, dtype.into()));
            }
        }
    }
}

impl<B: EmbeddingOps + Rows + IntoPrimitive, C: CheckpointStrategy> EmbeddingOps
    for Autodiff<B, C>
{
    fn token_vectors(
        table: FloatTensor<Self>,
        ids: IntTensor<Self>,
        options: EmbeddingOptions,
    ) -> FloatTensor<Self> {
        let (table, node) = table.into_parts();
        match EmbeddingBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                let num_rows = table.shape()[0];
                let dtype = table.dtype();
                let y = forward::<B>(table, ids.clone(), &options);
                op.finish(
                    SavedIds {
                        ids,
                        num_rows,
                        dtype,
                        options,
                    },
                    y,
                )
            }
            OpsKind::UnTracked(op) => op.finish(B::token_vectors(table, ids, options)),
        }
    }
}
