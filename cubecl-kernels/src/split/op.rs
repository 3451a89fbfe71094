//! Splitting under automatic differentiation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Shape};
use megaburn_autograd::backend_ops::{cast, slice_rows};
use megaburn_autograd::{InputGrads, MultiOutputOp};

use super::options::SliceMode;

/// The sizes and modes of the parts of one tensor along one dimension.
#[derive(Debug)]
pub(super) struct Split<const K: usize> {
    pub(super) sizes: [usize; K],
    pub(super) cuts: [SliceMode; K],
    pub(super) dim: usize,
}

/// Copies a view with gaps into contiguous memory.
pub(super) trait Compact: Backend {
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// What is saved for backward: the sizes of the parts and their dimension, and the shape and dtype of
/// the tensor.
#[derive(Clone, Debug)]
pub(super) struct SavedSplit<const K: usize> {
    sizes: [usize; K],
    dim: usize,
    shape: Shape,
    dtype: DType,
}

impl<B: Compact, const K: usize> MultiOutputOp<B, 1, K> for Split<K> {
    type Saved = SavedSplit<K>;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> ([FloatTensor<B>; K], Self::Saved) {
        let Self { sizes, cuts, dim } = self;
        let saved = SavedSplit {
            sizes,
            dim,
            shape: x.shape(),
            dtype: x.dtype(),
        };
        let parts = std::array::from_fn(|i| {
            let start = sizes[..i].iter().sum::<usize>();
            let part = slice_rows::<B>(x.clone(), dim, start..start + sizes[i]);
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
            dim,
            shape,
            dtype,
        } = saved;
        let given = dys.iter().flatten().next();
        let device = given.expect("at least one part has a gradient").device();
        let pieces = dys.into_iter().zip(sizes).map(|(dy, size)| match dy {
            Some(dy) => cast::<B>(dy, dtype.into()),
            None => {
                let mut shape = shape.clone();
                shape[dim] = size;
                B::float_zeros(shape, &device, dtype.into())
            }
        });
        grads.register(0, B::float_cat(pieces.collect(), dim));
    }
}
