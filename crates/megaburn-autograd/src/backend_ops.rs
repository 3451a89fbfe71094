//! Helpers of the handwritten operations: small steps on a backend's own tensors.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{BoolDType, DType, FloatDType, Shape, Slice, Tensor};

/// The dtype that statistics are computed in: f64 for f64, f32 for everything narrower.
pub fn compute_dtype(dtype: DType) -> FloatDType {
    if dtype == DType::F64 {
        FloatDType::F64
    } else {
        FloatDType::F32
    }
}

/// The dtype of truth values on a device: not all backends have Rust's own `bool`.
pub fn bool_dtype<B: Backend>(device: &B::Device) -> BoolDType {
    get_device_settings::<B>(device).bool_dtype
}

/// `x` in `dtype`; a no-op if it has that dtype already.
pub fn cast<B: Backend>(x: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if x.dtype() == dtype.into() {
        x
    } else {
        B::float_cast(x, dtype)
    }
}

/// `[.., n]` as `[rows, n]`.
pub fn rows<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let n = last_dim(&shape);
    let rows = shape[..shape.num_dims() - 1].iter().product();
    B::float_reshape(x, Shape::from([rows, n]))
}

/// Size of the last dimension.
pub fn last_dim(shape: &Shape) -> usize {
    shape[shape.num_dims() - 1]
}

/// A vector of `n` elements as `[1, n]` in `dtype`, for broadcasting over rows.
pub fn row<B: Backend>(vector: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let n = vector.shape().num_elements();
    B::float_reshape(cast::<B>(vector, dtype), Shape::from([1, n]))
}

/// Sums `[rows, n]` over its rows, to a vector of `n` elements in `dtype`.
pub fn sum_rows<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let n = last_dim(&x.shape());
    let sum = B::float_reshape(B::float_sum_dim(x, 0), Shape::from([n]));
    cast::<B>(sum, dtype.into())
}

/// Slices `range` of dimension `dim`: a view if the backend has views.
pub fn slice_rows<B: Backend>(
    x: FloatTensor<B>,
    dim: usize,
    range: Range<usize>,
) -> FloatTensor<B> {
    let shape = x.shape();
    // Flex refuses an empty slice that does not start at 0.
    let range = if shape.num_elements() == 0 {
        0..range.len()
    } else {
        range
    };
    let mut slices = vec![Slice::full(); shape.num_dims()];
    slices[dim] = Slice::from(range);
    B::float_slice(x, &slices)
}

/// The two halves of the last dimension: views if the backend has them.
pub fn halves<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let last = x.rank() - 1;
    let n = last_dim(&x.shape());
    (
        slice_rows::<B>(x.clone(), last, 0..n / 2),
        slice_rows::<B>(x, last, n / 2..n),
    )
}

/// The two halves of the last dimension.
pub fn chunk_halves<const D: usize>(x: Tensor<D>) -> [Tensor<D>; 2] {
    x.chunk(2, D - 1)
        .try_into()
        .expect("the last dimension is even")
}

/// `f(x)` in the compute dtype, with each row multiplied by its weight, in the dtype of `x`.
pub fn weigh<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    f: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let mut rows = x.dims();
    rows[D - 1] = 1;
    (f(x.cast(wide)) * weight.cast(wide).reshape(rows)).cast(dtype)
}

/// All elements as one row. (Burn's `reshape` gives a size of 0 another meaning, hence `reshaped`.)
pub fn as_row<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let len = x.shape().num_elements();
    reshaped(x, [1, len])
}

/// Reshapes `x`; `shape` may contain zeros.
pub fn reshaped<const D: usize, const E: usize>(x: Tensor<D>, shape: [usize; E]) -> Tensor<E> {
    if shape.contains(&0) {
        Tensor::empty(shape, (&x.device(), x.dtype()))
    } else {
        x.reshape(shape)
    }
}
