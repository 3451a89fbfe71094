//! Splits a tensor along its last dimension, and assembles its gradient in one pass.
//!
//! The gradient of an ordinary slice is a full-size tensor of zeros with the slice's gradient in
//! it, and the gradients of several slices are added up: for queries, keys and values sliced from
//! one projection that takes about ten passes over memory. Here all parts are results of one
//! operation, which concatenates their gradients once all of them have arrived.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::backend_ops::{cast, slice_rows};
use megaburn_autograd::{InputGrads, MultiOutputOp, fused_outputs};

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

/// How a part of a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceMode {
    /// A view, which keeps the memory of the full tensor alive.
    View,
    /// A copy, which holds only its own memory: for a part that outlives the others.
    Copy,
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
    fused_outputs(Split { sizes, cuts }, [x.into_dispatch()])
}

/// The sizes and modes of the parts of one tensor.
#[derive(Debug)]
struct Split<const K: usize> {
    sizes: [usize; K],
    cuts: [SliceMode; K],
}

/// Copies a view with gaps into contiguous memory.
trait Compact: Backend {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl Compact for burn::backend::Flex {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.to_contiguous()
    }
}

#[cfg(feature = "cuda")]
impl Compact for burn::backend::Cube {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self> {
        use megaburn_cuda::tensor;
        tensor::into_backend(tensor::contiguous(tensor::from_backend(x)))
    }
}

/// What is saved for backward: the sizes of the parts, and the shape and dtype of the tensor.
#[derive(Clone, Debug)]
struct SavedSplit<const K: usize> {
    sizes: [usize; K],
    shape: Shape,
    dtype: DType,
}

impl<B: Compact, const K: usize> MultiOutputOp<B, 1, K> for Split<K> {
    type Saved = SavedSplit<K>;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> ([FloatTensor<B>; K], Self::Saved) {
        let Self { sizes, cuts } = self;
        let saved = SavedSplit {
            sizes,
            shape: x.shape(),
            dtype: x.dtype(),
        };
        let last = x.rank() - 1;
        let parts = std::array::from_fn(|i| {
            let start = sizes[..i].iter().sum::<usize>();
            let part = slice_rows::<B>(x.clone(), last, start..start + sizes[i]);
            match cuts[i] {
                SliceMode::View => part,
                SliceMode::Copy => B::compact(part),
            }
        });
        (parts, saved)
    }

    fn backward(
        saved: Self::Saved,
        dys: [Option<FloatTensor<B>>; K],
        mut grads: InputGrads<'_, B>,
    ) {
        let SavedSplit {
            sizes,
            shape,
            dtype,
        } = saved;
        let last = shape.num_dims() - 1;
        let given = dys.iter().flatten().next();
        let device = given.expect("at least one part has a gradient").device();
        let pieces = dys.into_iter().zip(sizes).map(|(dy, size)| match dy {
            Some(dy) => cast::<B>(dy, dtype.into()),
            None => {
                let mut shape = shape.clone();
                shape[last] = size;
                B::float_zeros(shape, &device, dtype.into())
            }
        });
        grads.register(0, B::float_cat(pieces.collect(), last));
    }
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_refused, constant, distance, leaf, normal, quantized};
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
        let slices = |x: Tensor<3>| {
            let part = |start, len| x.clone().narrow(2, start, len);
            [part(0, 4), part(4, 2), part(6, 3)]
        };
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

    #[test]
    fn the_tensor_may_be_used_beside_its_parts() {
        let x = normal([2, 5]);
        let loss =
            |[a, b]: [Tensor<2>; 2], x: Tensor<2>| (a * 2.0).sum() + b.exp().sum() + x.exp().sum();
        let slices = [x.clone().narrow(1, 0, 3), x.clone().narrow(1, 3, 2)];
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
    #[case(|| drop(split_last(quantized([2, 8]), [4, 4])), "split_last: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
