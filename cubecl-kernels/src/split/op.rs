//! Splitting under automatic differentiation.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use megaburn_autograd::backend_ops::{cast, slice_rows};
use megaburn_autograd::{InputGrads, MultiOutputOp};

use super::options::SliceMode;
use crate::quantized::FoundAmax;
use crate::quantized::operands::QuantizedOps;

/// The sizes and modes of the parts of one tensor along one dimension.
#[derive(Debug)]
pub(super) struct Split<const K: usize> {
    pub(super) sizes: [usize; K],
    pub(super) cuts: [SliceMode; K],
    pub(super) dim: usize,
    /// The largest magnitude of the tensor's gradient, if it is to be found.
    pub(super) amax: Option<FoundAmax>,
}

/// Copies of parts, with the best implementation per backend.
pub(super) trait Assembly: QuantizedOps {
    /// Copies a view with gaps into contiguous memory.
    fn compact(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The parts one after the other along a dimension, and their largest magnitude, `[1]` in f32.
    fn joined_observed(parts: Vec<FloatTensor<Self>>, dim: usize) -> [FloatTensor<Self>; 2] {
        let whole = Self::float_cat(parts, dim);
        [whole.clone(), Self::largest_magnitude(whole)]
    }
}

/// The shape of parts one after the other.
#[cfg(feature = "cuda")]
pub(super) fn joined_shape<B: Assembly>(parts: &[FloatTensor<B>], dim: usize) -> Shape {
    let mut shape = parts[0].shape();
    shape[dim] = parts.iter().map(|part| part.shape()[dim]).sum();
    shape
}

/// What is saved for backward: the split, and the shape and dtype of the tensor.
#[derive(Clone, Debug)]
pub(super) struct SavedSplit<const K: usize> {
    sizes: [usize; K],
    dim: usize,
    amax: Option<FoundAmax>,
    shape: Shape,
    dtype: DType,
}

impl<B: Assembly, const K: usize> MultiOutputOp<B, 1, K> for Split<K> {
    type Saved = SavedSplit<K>;

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> ([FloatTensor<B>; K], Self::Saved) {
        let Self {
            sizes,
            cuts,
            dim,
            amax,
        } = self;
        let saved = SavedSplit {
            sizes,
            dim,
            amax,
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
            amax,
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
        let pieces = pieces.collect();
        let whole = match amax {
            None => B::float_cat(pieces, dim),
            Some(found) => {
                let [whole, amax] = B::joined_observed(pieces, dim);
                found.put::<B>(amax);
                whole
            }
        };
        grads.register(0, whole);
    }
}
