//! The softmax of the scores and its gradient, composed of a backend's primitives.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, TensorData};
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::on_composed_backends;

use crate::attention::scores::{Scores, Visible};

on_composed_backends! {
    impl Scores {
        fn probabilities(
            scores: FloatTensor<Self>,
            visible: &Visible<'_>,
            dtype: FloatDType,
        ) -> FloatTensor<Self> {
            probabilities::<Self>(scores, visible, dtype)
        }

        fn score_gradient(
            p: FloatTensor<Self>,
            dp: FloatTensor<Self>,
            output: Option<(FloatTensor<Self>, FloatTensor<Self>)>,
        ) -> FloatTensor<Self> {
            score_gradient::<Self>(p, dp, output)
        }
    }
}

/// See [`Scores::probabilities`].
pub(in crate::attention) fn probabilities<B: Backend>(
    scores: FloatTensor<B>,
    visible: &Visible<'_>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    cast::<B>(softmax::<B>(scores, visible), dtype)
}

/// See [`Scores::score_gradient`].
pub(in crate::attention) fn score_gradient<B: Backend>(
    p: FloatTensor<B>,
    dp: FloatTensor<B>,
    output: Option<(FloatTensor<B>, FloatTensor<B>)>,
) -> FloatTensor<B> {
    let wide = dp.dtype().into();
    let p = cast::<B>(p, wide);
    let terms = match output {
        Some((out, dout)) => B::float_mul(cast::<B>(out, wide), cast::<B>(dout, wide)),
        None => B::float_mul(p.clone(), dp.clone()),
    };
    B::float_mul(B::float_sub(dp, B::float_sum_dim(terms, 3)), p)
}

/// Softmax over the keys that each query sees, in the dtype of the scores.
fn softmax<B: Backend>(scores: FloatTensor<B>, visible: &Visible<'_>) -> FloatTensor<B> {
    let Visible {
        queries,
        keys,
        s_k,
        options,
    } = visible;
    let visible: Vec<_> = queries.clone().map(|i| options.visible(i, *s_k)).collect();
    if visible.iter().all(|v| v == keys) {
        return B::softmax(scores, 3);
    }
    let shape = scores.shape();
    let device = scores.device();
    let dtype = scores.dtype();
    let constant = |data: Vec<f32>, shape: [usize; 3]| {
        cast::<B>(
            B::float_from_data(TensorData::new(data, shape), &device),
            dtype.into(),
        )
    };
    // A query without keys keeps finite scores here; its row is zeroed below.
    let s = queries.len();
    let n = keys.len();
    let mut bias = vec![0.0; s * n];
    for (row, seen) in bias
        .chunks_mut(n)
        .zip(&visible)
        .filter(|(_, seen)| !seen.is_empty())
    {
        row[..seen.start - keys.start].fill(f32::NEG_INFINITY);
        row[seen.end - keys.start..].fill(f32::NEG_INFINITY);
    }
    let heads = shape.num_elements() / (s * n);
    let scores = B::float_reshape(scores, Shape::from([heads, s, n]));
    let mut probabilities = B::softmax(B::float_add(scores, constant(bias, [1, s, n])), 2);
    if visible.iter().any(Range::is_empty) {
        let seeing = visible
            .iter()
            .map(|seen| if seen.is_empty() { 0.0 } else { 1.0 })
            .collect();
        probabilities = B::float_mul(probabilities, constant(seeing, [1, s, 1]));
    }
    B::float_reshape(probabilities, shape)
}
