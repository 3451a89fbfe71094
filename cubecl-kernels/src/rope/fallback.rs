//! The rotation composed of a backend's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;
use megaburn_autograd::backend_ops::{cast, compute_dtype, slice_rows};
use megaburn_autograd::on_composed_backends;

use super::op::{RopeDirection, Rotate};
use super::table::RopeLayout;

on_composed_backends! {
    impl Rotate {
        fn rotate(
            x: FloatTensor<Self>,
            cos: FloatTensor<Self>,
            sin: FloatTensor<Self>,
            layout: RopeLayout,
            turn: RopeDirection,
        ) -> FloatTensor<Self> {
            rotate::<Self>(x, cos, sin, layout, turn)
        }
    }
}

/// See [`Rotate::rotate`].
pub(super) fn rotate<B: Backend>(
    x: FloatTensor<B>,
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    layout: RopeLayout,
    turn: RopeDirection,
) -> FloatTensor<B> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let [s, b, h, d] = x.shape().dims();
    let [_, each, _, half] = cos.shape().dims();
    let rest = (2 * half < d).then(|| slice_rows::<B>(x.clone(), 3, 2 * half..d));
    let x = if rest.is_some() {
        slice_rows::<B>(x, 3, 0..2 * half)
    } else {
        x
    };
    // With halves, pairs are `[.., 2, r / 2]`; with neighbors, `[.., r / 2, 2]`.
    let (dim, pairs, table) = match layout {
        RopeLayout::Halves => (3, [s, b, h, 2, half], [s, each, 1, 1, half]),
        RopeLayout::Interleaved => (4, [s, b, h, half, 2], [s, each, 1, half, 1]),
    };
    let [cos, sin] = [cos, sin].map(|t| B::float_reshape(cast::<B>(t, wide), Shape::from(table)));
    let x = B::float_reshape(cast::<B>(x, wide), Shape::from(pairs));
    let [first, second] = [0..1, 1..2].map(|one| slice_rows::<B>(x.clone(), dim, one));
    let first_cos = B::float_mul(first.clone(), cos.clone());
    let second_cos = B::float_mul(second.clone(), cos);
    let first_sin = B::float_mul(first, sin.clone());
    let second_sin = B::float_mul(second, sin);
    let turned = match turn {
        RopeDirection::Forward => {
            vec![
                B::float_sub(first_cos, second_sin),
                B::float_add(second_cos, first_sin),
            ]
        }
        RopeDirection::Inverse => {
            vec![
                B::float_add(first_cos, second_sin),
                B::float_sub(second_cos, first_sin),
            ]
        }
    };
    let y = B::float_reshape(B::float_cat(turned, dim), Shape::from([s, b, h, 2 * half]));
    let y = cast::<B>(y, dtype.into());
    match rest {
        Some(rest) => B::float_cat(vec![y, rest], 3),
        None => y,
    }
}
