//! Splits a tensor along a dimension, and assembles its gradient in one pass.
//!
//! The gradient of an ordinary slice is a full-size tensor of zeros with the slice's gradient in
//! it, and the gradients of several slices are added up: for queries, keys and values sliced from
//! one projection that takes about ten passes over memory. Here all parts are results of one
//! operation, which concatenates their gradients once all of them have arrived.

mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
mod options;
#[cfg(test)]
mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused_outputs;

use crate::quantized::FoundAmax;
use op::Split;
pub use options::SliceMode;

/// Splits the last dimension into adjacent slices, which are views if the backend has them.
/// Backward is one pass over the gradients of all parts; a part without a gradient counts as zero.
/// The parts are one operation: a `backward` from one of them consumes the graph of all.
///
/// # Shapes
/// `[.., n]` to `[.., sizes[i]]` each
///
/// # Panics
/// If the sizes do not add up to `n`.
pub fn split_last<const D: usize, const N: usize>(
    x: Tensor<D>,
    sizes: [usize; N],
) -> [Tensor<D>; N] {
    split_last_with(x, sizes, [SliceMode::View; N])
}

/// [`split_last`] with a [`SliceMode`] for each part.
///
/// # Shapes
/// `[.., n]` to `[.., sizes[i]]` each
///
/// # Panics
/// As [`split_last`].
pub fn split_last_with<const D: usize, const N: usize>(
    x: Tensor<D>,
    sizes: [usize; N],
    cuts: [SliceMode; N],
) -> [Tensor<D>; N] {
    arg_check::check("split_last", [float("x", &x)]);
    let n = x.dims()[D - 1];
    assert_eq!(
        sizes.iter().sum::<usize>(),
        n,
        "split_last: sizes {sizes:?} do not add up to {n} columns"
    );
    let dim = D - 1;
    let split = Split {
        sizes,
        cuts,
        dim,
        amax: None,
    };
    fused_outputs(split, [x.into_dispatch()])
}

/// [`split_last_with`] of features that are heads one after the other: each part has some of them.
///
/// Burn's `reshape` of a part of the features copies it if there is one sequence, though a view would
/// do. So the features become heads first.
///
/// # Shapes
/// `[s, b, n * head_dim]` to `[s, b, counts[i], head_dim]` each
///
/// # Panics
/// If the counts do not add up to `n`.
pub fn split_heads<const N: usize>(
    x: Tensor<3>,
    head_dim: usize,
    counts: [usize; N],
    cuts: [SliceMode; N],
) -> [Tensor<4>; N] {
    of_heads(x, head_dim, counts, cuts, None)
}

/// [`split_heads`] that finds the largest magnitude of the gradient of `x`, for the layer that quantises
/// it.
///
/// # Shapes
/// As [`split_heads`].
///
/// # Panics
/// As [`split_heads`].
pub fn split_heads_observed<const N: usize>(
    x: Tensor<3>,
    head_dim: usize,
    counts: [usize; N],
    cuts: [SliceMode; N],
    gradient: FoundAmax,
) -> [Tensor<4>; N] {
    of_heads(x, head_dim, counts, cuts, Some(gradient))
}

fn of_heads<const N: usize>(
    x: Tensor<3>,
    head_dim: usize,
    counts: [usize; N],
    cuts: [SliceMode; N],
    amax: Option<FoundAmax>,
) -> [Tensor<4>; N] {
    arg_check::check("split_heads", [float("x", &x)]);
    let [s, b, features] = x.dims();
    let n = counts.iter().sum::<usize>();
    assert_eq!(
        n * head_dim,
        features,
        "split_heads: {counts:?} heads of {head_dim} features are not {features} features"
    );
    let split = Split {
        sizes: counts,
        cuts,
        dim: 2,
        amax,
    };
    fused_outputs(split, [x.reshape([s, b, n, head_dim]).into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_bits, constant, distance, leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::all([true, true, true])]
    #[case::some_are_not_used([false, true, false])]
    fn values_and_gradients_are_those_of_slices(#[case] used: [bool; 3]) {
        let sizes = [4, 2, 3];
        let x = normal([3, 2, 9]);
        let weights = sizes.map(|size| constant([3, 2, size]));
        let loss = |parts: [Tensor<3>; 3]| {
            let parts = parts.into_iter().zip(weights.clone()).zip(used);
            let used = parts.filter(|(_, used)| *used);
            used.map(|((part, weight), _)| (part.exp() * weight).sum())
                .reduce(|a, b| a + b)
        };
        let slices = |x: Tensor<3>| reference::split_last(x, sizes);
        let expected = x
            .grad(&loss(slices(x.clone())).unwrap().backward())
            .unwrap();
        let x = leaf(x);
        for cuts in [
            [SliceMode::View; 3],
            [SliceMode::View, SliceMode::View, SliceMode::Copy],
            [SliceMode::Copy; 3],
        ] {
            let parts = || split_last_with(x.clone(), sizes, cuts);
            for (part, slice) in parts().into_iter().zip(slices(x.clone())) {
                assert_eq!(distance(part, slice), 0.0);
            }
            let found = x.grad(&loss(parts()).unwrap().backward()).unwrap();
            assert_eq!(distance(found, expected.clone()), 0.0);
        }
    }

    #[rstest]
    fn heads_are_split_as_the_features_that_they_are(
        #[values([3, 1], [4, 2])] sizes: [usize; 2],
        #[values(SliceMode::View, SliceMode::Copy)] cut: SliceMode,
    ) {
        let [seq, batch] = sizes;
        let counts = [4, 2, 1];
        let x = leaf(normal([seq, batch, 7 * 6]));
        let weights = counts.map(|count| constant([seq, batch, count, 6]));
        let of_features = || {
            let parts = split_last(x.clone(), counts.map(|count| count * 6));
            let mut counts = counts.into_iter();
            parts.map(|part| part.reshape([seq, batch, counts.next().expect("3 parts"), 6]))
        };
        let of_heads = || split_heads(x.clone(), 6, counts, [cut; 3]);
        for (found, expected) in of_heads().into_iter().zip(of_features()) {
            assert_eq!(distance(found, expected), 0.0);
        }
        let gradient = |parts: [Tensor<4>; 3]| {
            let parts = parts.into_iter().zip(weights.clone());
            let loss = parts
                .map(|(part, weight)| (part.exp() * weight).sum())
                .reduce(|a, b| a + b);
            x.grad(&loss.expect("3 parts").backward()).unwrap()
        };
        assert_eq!(distance(gradient(of_heads()), gradient(of_features())), 0.0);
    }

    #[rstest]
    fn the_found_magnitude_is_that_of_the_gradient(
        #[values([3, 1], [4, 2], [0, 2])] sizes: [usize; 2],
        #[values(DType::F32, DType::BF16)] dtype: DType,
        #[values([true, true], [false, true])] used: [bool; 2],
    ) {
        let [seq, batch] = sizes;
        let x = leaf(normal([seq, batch, 5 * 3]).cast(dtype));
        let gradient = |parts: [Tensor<4>; 2]| {
            let parts = parts.into_iter().zip(used).filter(|(_, used)| *used);
            let loss = parts.map(|(part, _)| part.exp().sum());
            let loss = loss.reduce(|a, b| a + b).expect("one part is used");
            x.grad(&loss.backward()).unwrap()
        };
        let cuts = [SliceMode::View; 2];
        let expected = gradient(split_heads(x.clone(), 3, [4, 1], cuts));
        let found = FoundAmax::default();
        let observed = split_heads_observed(x.clone(), 3, [4, 1], cuts, found.clone());
        assert_same_bits(gradient(observed), expected.clone());
        let largest = values(expected)
            .into_iter()
            .fold(0.0, |most: f64, x| most.max(x.abs()));
        assert_eq!(values(found.value().unwrap()), [largest]);
    }

    #[test]
    fn the_tensor_may_be_used_beside_its_parts() {
        let x = normal([2, 5]);
        let loss =
            |[a, b]: [Tensor<2>; 2], x: Tensor<2>| (a * 2.0).sum() + b.exp().sum() + x.exp().sum();
        let slices = reference::split_last(x.clone(), [3, 2]);
        let expected = x.grad(&loss(slices, x.clone()).backward()).unwrap();
        let x = leaf(x);
        let found = x
            .grad(&loss(split_last(x.clone(), [3, 2]), x.clone()).backward())
            .unwrap();
        assert!(distance(found, expected) < 1e-6);
    }

    #[rstest]
    #[case([4, 3, 5])]
    #[case([0, 3, 5])]
    fn views_empty_tensors_and_empty_parts_are_split(#[case] shape: [usize; 3]) {
        let x = normal(shape);
        let view = x.clone().swap_dims(0, 1);
        let [a, none, b] = split_last(view.clone(), [2, 0, 3]);
        assert_eq!(none.dims(), [3, shape[0], 0]);
        let weights = [2, 3].map(|size| constant([3, shape[0], size]));
        let [of_a, of_b] = weights.clone();
        let loss = (a.clone() * of_a).sum() + (b.clone() * of_b).sum();
        assert_eq!(distance(Tensor::cat(vec![a, b], 2), view), 0.0);
        let grad = x.grad(&loss.backward()).unwrap();
        let expected = Tensor::cat(weights.to_vec(), 2).inner().swap_dims(0, 1);
        assert_eq!(distance(grad, expected), 0.0);
    }

    #[rstest]
    #[case(|| drop(split_last(normal([2, 5]), [3, 3])), "split_last: sizes [3, 3] do not add up to 5 columns")]
    #[case(
        || drop(split_heads(normal([2, 1, 6]), 2, [1, 3], [SliceMode::View; 2])),
        "split_heads: [1, 3] heads of 2 features are not 6 features"
    )]
    #[case(|| drop(split_last(quantized([2, 8]), [4, 4])), "split_last: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
