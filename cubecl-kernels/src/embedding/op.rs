//! Embedding lookup under automatic differentiation.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Int, Shape, Tensor};
use megaburn_autograd::backend_ops::{cast, compute_dtype, last_dim, rows};
use megaburn_autograd::{FusedOp, InputGrads, IntoPrimitive, LinearPass, MainGrad, read_weight};

use super::options::EmbeddingOptions;

/// Token ids, `[n]`, and [`first`](EmbeddingOptions::first) of the options.
#[derive(Clone, Debug)]
pub(super) struct Tokens<I> {
    pub(super) ids: I,
    pub(super) first: Option<usize>,
}

/// Row gather and row scatter-add of a table, with the best implementation per backend.
pub(crate) trait Rows: Backend {
    /// Gathers the row of each token.
    ///
    /// # Shapes
    /// `table: [rows, d]` to `[n, d]`
    fn take_rows(table: FloatTensor<Self>, tokens: Tokens<IntTensor<Self>>) -> FloatTensor<Self>;

    /// Adds the gradient of each token to the token's row of `sum`. May write `sum` in place.
    ///
    /// # Shapes
    /// `dy: [n, d]`; `sum`, in the compute dtype, and the result: `[rows, d]`
    fn add_rows(
        dy: FloatTensor<Self>,
        tokens: Tokens<IntTensor<Self>>,
        sum: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// A lookup in a table `[rows, d]`, to `[s, b, d]`.
#[derive(Debug)]
pub(super) struct Lookup {
    /// `[s, b]`
    pub(super) ids: Tensor<2, Int>,
    pub(super) options: EmbeddingOptions,
}

fn flat<B: Backend>(ids: IntTensor<B>, options: &EmbeddingOptions) -> Tokens<IntTensor<B>> {
    let n = ids.shape().num_elements();
    Tokens {
        ids: B::int_reshape(ids, Shape::from([n])),
        first: options.first,
    }
}

#[derive(Clone, Debug)]
pub(super) struct SavedIds<I> {
    ids: I,
    num_rows: usize,
    dtype: DType,
    options: EmbeddingOptions,
}

impl<B: Rows + IntoPrimitive> FusedOp<B, 1> for Lookup {
    type Saved = SavedIds<IntTensor<B>>;

    fn forward(self, [table]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let Self { ids, options } = self;
        let [s, b] = ids.dims();
        let ids = B::unwrap_int(ids);
        let [num_rows, d] = table.shape().dims();
        let dtype = table.dtype();
        let table = read_weight::<B>(table, options.main_grad.as_ref(), LinearPass::Forward);
        let vectors = B::take_rows(table, flat::<B>(ids.clone(), &options));
        let y = B::float_reshape(vectors, Shape::from([s, b, d]));
        let saved = SavedIds {
            ids,
            num_rows,
            dtype,
            options,
        };
        (y, saved)
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let SavedIds {
            ids,
            num_rows,
            dtype,
            options,
        } = saved;
        let dy = rows::<B>(dy);
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
                grads.register(0, cast::<B>(sum, dtype.into()));
            }
        }
    }
}
