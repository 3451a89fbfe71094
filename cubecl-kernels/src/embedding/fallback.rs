//! Gathers rows of a table and adds rows to one, composed of a backend's primitives.

use burn::backend::tensor::{FloatTensor, IndexingUpdateOp, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use megaburn_autograd::backend_ops::{bool_dtype, cast};
use megaburn_autograd::on_composed_backends;

use super::op::{Rows, Tokens};

on_composed_backends! {
    impl Rows {
        fn take_rows(
            table: FloatTensor<Self>,
            tokens: Tokens<IntTensor<Self>>,
        ) -> FloatTensor<Self> {
            take_rows::<Self>(table, tokens)
        }

        fn add_rows(
            dy: FloatTensor<Self>,
            tokens: Tokens<IntTensor<Self>>,
            sum: FloatTensor<Self>,
        ) -> FloatTensor<Self> {
            add_rows::<Self>(dy, tokens, sum)
        }
    }
}

/// Returns row numbers, 0 for tokens without a row, and a function that zeroes the rows of these
/// tokens in `x: [n, d]`.
fn masked<B: Backend>(
    tokens: Tokens<IntTensor<B>>,
    rows: usize,
) -> (IntTensor<B>, impl Fn(FloatTensor<B>) -> FloatTensor<B>) {
    let Tokens { ids, first } = tokens;
    let (local, outside) = match first {
        None => (ids, None),
        Some(first) => {
            let local = B::int_sub_scalar(ids, (first as i64).into());
            let bools = bool_dtype::<B>(&local.device());
            let below = B::int_lower_elem(local.clone(), 0i64.into(), bools);
            let above = B::int_greater_equal_elem(local.clone(), (rows as i64).into(), bools);
            let outside = B::bool_or(below, above);
            (
                B::int_mask_fill(local, outside.clone(), 0i64.into()),
                Some(outside),
            )
        }
    };
    let mask = move |x: FloatTensor<B>| match &outside {
        None => x,
        Some(outside) => {
            let shape = x.shape();
            let column = B::bool_reshape(outside.clone(), Shape::from([shape[0], 1]));
            B::float_mask_fill(x, B::bool_expand(column, shape), 0.0.into())
        }
    };
    (local, mask)
}

/// See [`Rows::take_rows`].
pub(super) fn take_rows<B: Backend>(
    table: FloatTensor<B>,
    tokens: Tokens<IntTensor<B>>,
) -> FloatTensor<B> {
    let (local, mask) = masked::<B>(tokens, table.shape()[0]);
    mask(B::float_select(table, 0, local))
}

/// See [`Rows::add_rows`].
pub(super) fn add_rows<B: Backend>(
    dy: FloatTensor<B>,
    tokens: Tokens<IntTensor<B>>,
    sum: FloatTensor<B>,
) -> FloatTensor<B> {
    let (local, mask) = masked::<B>(tokens, sum.shape()[0]);
    let dy = mask(cast::<B>(dy, sum.dtype().into()));
    B::float_select_assign(sum, 0, local, dy, IndexingUpdateOp::Add)
}
