//! What the handwritten operations share: small steps on a backend's own tensors.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape, Slice, Tensor};

/// The dtype that statistics are computed in: f64 for f64, f32 for everything narrower.
pub(crate) fn compute_dtype(dtype: DType) -> FloatDType {
    if dtype == DType::F64 {
        FloatDType::F64
    } else {
        FloatDType::F32
    }
}

/// `x` in `dtype`; nothing happens when it is already.
pub(crate) fn cast<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if x.dtype() == dtype.into() {
        x
    } else {
        B::float_cast(x, dtype)
    }
}

/// `[.., n]` as `[rows, n]`.
pub(crate) fn rows<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let n = last_dim(&shape);
    let rows = shape[..shape.num_dims() - 1].iter().product();
    B::float_reshape(x, Shape::from([rows, n]))
}

/// Size of the last dimension.
pub(crate) fn last_dim(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// A vector of `n` in `dtype`, as `[1, n]`, to be broadcast over rows.
pub(crate) fn row<B: Backend>(vector: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let n = vector.shape().num_elements();
    B::float_reshape(cast::<B>(vector, dtype), Shape::from([1, n]))
}

/// Sum over the rows of `[rows, n]`, as a vector of `n` in `dtype`.
pub(crate) fn sum_rows<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let n = last_dim(&x.shape());
    let sum = B::float_reshape(B::float_sum_dim(x, 0), Shape::from([n]));
    cast::<B>(sum, dtype.into())
}

/// A stretch of a dimension: a view where the backend has them.
pub(crate) fn slice_rows<B: Backend>(
    x: FloatTensor<B>,
    dim: usize,
    range: Range<usize>,
) -> FloatTensor<B> {
    let shape = x.shape();
    // Flex refuses to read nothing from anywhere but the beginning.
    let range = if shape.num_elements() == 0 {
        0..range.len()
    } else {
        range
    };
    let mut slices = vec![Slice::full(); shape.num_dims()];
    slices[dim] = Slice::from(range);
    B::float_slice(x, &slices)
}

/// The two halves of the last dimension: views where the backend has them.
pub(crate) fn halves<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let last = x.rank() - 1;
    let n = last_dim(&x.shape());
    (
        slice_rows::<B>(x.clone(), last, 0..n / 2),
        slice_rows::<B>(x, last, n / 2..n),
    )
}

/// The two halves of the last dimension.
pub(crate) fn chunk_halves<const D: usize>(x: Tensor<D>) -> [Tensor<D>; 2] {
    x.chunk(2, D - 1)
        .try_into()
        .expect("an even dimension has two halves")
}

/// `f(x)` in the compute dtype, each row times its weight, in the dtype of `x`.
pub(crate) fn weigh<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    f: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let mut rows = x.dims();
    rows[D - 1] = 1;
    (f(x.cast(wide)) * weight.cast(wide).reshape(rows)).cast(dtype)
}

/// All elements as one row. (Where there are none: a size of 0 means another one to Burn's `reshape`.)
pub(crate) fn as_row<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let len = x.shape().num_elements();
    reshaped(x, [1, len])
}

/// The elements in another shape.
pub(crate) fn reshaped<const D: usize, const E: usize>(
    x: Tensor<D>,
    shape: [usize; E],
) -> Tensor<E> {
    if shape.contains(&0) {
        Tensor::empty(shape, (&x.device(), x.dtype()))
    } else {
        x.reshape(shape)
    }
}
