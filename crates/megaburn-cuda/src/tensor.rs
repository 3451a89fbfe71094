//! CubeCL's tensors at the interface to foreign libraries; the only module that deals with pitched
//! rows.
//!
//! CubeCL pads the rows of its allocations, and slices and transposed tensors share their parent's
//! memory. A library that takes a leading dimension can read most of these without a copy
//! ([`MatrixView`]); a library that takes a flat buffer needs [`contiguous`].

use burn::backend::TensorMetadata;
#[cfg(not(feature = "fusion"))]
use burn::backend::{Cube, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::{
    kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};

/// Returns a tensor with contiguous elements; copies only if necessary.
pub fn contiguous(tensor: CubeTensor) -> CubeTensor {
    into_contiguous(tensor)
}

/// Converts Burn's tensor on a CubeCL device into CubeCL's own. With the feature `fusion`,
/// everything that it depends on, and everything that was queued before, is launched first.
#[cfg(not(feature = "fusion"))]
pub fn from_backend(tensor: FloatTensor<Cube>) -> CubeTensor {
    tensor
}

/// Converts CubeCL's tensor into Burn's; the inverse of [`from_backend`].
#[cfg(not(feature = "fusion"))]
pub fn into_backend(tensor: CubeTensor) -> FloatTensor<Cube> {
    tensor
}

#[cfg(feature = "fusion")]
pub use crate::fusion::{from_backend, into_backend};

/// Swaps the last two dimensions, in the same memory.
pub fn transposed(tensor: CubeTensor) -> CubeTensor {
    let mut tensor = if is_tiled(&tensor) {
        contiguous(tensor)
    } else {
        tensor
    };
    let rank = tensor.meta.num_dims();
    tensor.meta.swap(rank - 2, rank - 1);
    tensor
}

/// Whether the tensor's memory is tiled, so that its strides do not correspond to its dimensions.
fn is_tiled(tensor: &CubeTensor) -> bool {
    tensor.meta.shape().num_dims() != TensorMetadata::rank(tensor)
}

/// Allocates memory without padding on the device of `like`; its content is undefined.
pub fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        shape.into(),
        dtype,
    )
}

/// A slice of the memory of `whole`, `[n]`, which can be written in place; `None` where CubeCL
/// cannot slice the memory.
pub fn slice_of(whole: &CubeTensor, start: usize, shape: impl Into<Shape>) -> Option<CubeTensor> {
    let shape = shape.into();
    let end = (start + shape.num_elements()) * whole.dtype.size();
    let behind = (whole.meta.num_elements() * whole.dtype.size()).checked_sub(end)?;
    let found = uninitialized_slice(whole, start, shape)?;
    (behind as u64).is_multiple_of(cut(whole)).then_some(found)
}

/// Like [`slice_of`], but only the start must lie on a slice boundary of CubeCL; the slice's memory
/// may extend beyond its end by less than one boundary step. Use it only for kernels that get the
/// number of elements as an argument, because CubeCL's kernels take it from the memory.
pub fn uninitialized_slice(
    whole: &CubeTensor,
    start: usize,
    shape: impl Into<Shape>,
) -> Option<CubeTensor> {
    let size = whole.dtype.size();
    let shape = shape.into();
    let behind = whole
        .meta
        .num_elements()
        .checked_sub(start + shape.num_elements())?;
    let [front, back] = [start, behind].map(|len| (len * size) as u64);
    let cut = cut(whole);
    if !front.is_multiple_of(cut) {
        return None;
    }
    let handle = whole
        .handle
        .clone()
        .offset_start(front)
        .offset_end(back - back % cut);
    let client = whole.client.clone();
    let device = whole.device.clone();
    Some(CubeTensor::new_contiguous(
        client,
        device,
        shape,
        handle,
        whole.dtype,
    ))
}

/// The alignment in bytes of slices that share memory (512 on CUDA). At other offsets, Burn copies.
fn cut(x: &CubeTensor) -> u64 {
    x.client.properties().memory.alignment
}

/// Whether both tensors are the same elements of the same memory.
pub fn is_same(a: &CubeTensor, b: &CubeTensor) -> bool {
    let [(a, of_a), (b, of_b)] = [a, b].map(|x| (&x.handle, &x.meta));
    std::ptr::eq(a.memory.descriptor(), b.memory.descriptor())
        && (a.offset_start, a.offset_end) == (b.offset_start, b.offset_end)
        && of_a.strides() == of_b.strides()
}

/// The memory layout of a tensor `[.., rows, cols]` that is a batch of equally spaced matrices. All
/// numbers are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixView {
    /// The number of rows of a matrix.
    pub rows: usize,
    /// The number of columns of a matrix.
    pub cols: usize,
    /// The distance from one row to the next or, if `transposed`, from one column to the next.
    pub ld: usize,
    /// Whether columns, not rows, are contiguous.
    pub transposed: bool,
    /// The number of matrices.
    pub batch: usize,
    /// The distance from one matrix to the next.
    pub batch_stride: usize,
}

impl MatrixView {
    /// The view with this shape and these strides; `None` if it has no leading dimension.
    ///
    /// # Shapes
    /// `[.., rows, cols]`; both slices have the same length, and no dimension is empty.
    pub fn new(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let matrix = shape.len().checked_sub(2)?;
        if shape.contains(&0) {
            return None;
        }
        let [rows, cols] = [shape[matrix], shape[matrix + 1]];
        let [by_row, by_col] = [strides[matrix], strides[matrix + 1]];
        // The stride of a dimension of size one carries no information.
        let ld = |len: usize, stride: usize, inner: usize| if len == 1 { inner } else { stride };
        let (ld, transposed) = if (cols == 1 || by_col == 1) && ld(rows, by_row, cols) >= cols {
            (ld(rows, by_row, cols), false)
        } else if (rows == 1 || by_row == 1) && ld(cols, by_col, rows) >= rows {
            (ld(cols, by_col, rows), true)
        } else {
            return None;
        };
        let mut batch = 1;
        let mut batch_stride = 0;
        for (&len, &stride) in shape[..matrix].iter().zip(strides).rev() {
            if len == 1 {
                continue;
            }
            if batch == 1 {
                batch_stride = stride;
            } else if stride != batch_stride * batch {
                return None;
            }
            batch *= len;
        }
        Some(Self {
            rows,
            cols,
            ld,
            transposed,
            batch,
            batch_stride,
        })
    }

    /// Returns the tensor itself, or a contiguous copy if its strides are not those of a matrix,
    /// and its view.
    ///
    /// # Panics
    /// If the tensor has fewer than two dimensions or an empty one.
    pub fn of(tensor: CubeTensor) -> (CubeTensor, Self) {
        let view = |tensor: &CubeTensor| Self::new(tensor.meta.shape(), tensor.meta.strides());
        if !is_tiled(&tensor)
            && let Some(found) = view(&tensor)
        {
            return (tensor, found);
        }
        let tensor = contiguous(tensor);
        let found = view(&tensor).expect("a contiguous tensor is a batch of matrices");
        (tensor, found)
    }

    /// The view of the transposed matrices, in the same memory.
    pub fn swapped(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(
        rows: usize,
        cols: usize,
        ld: usize,
        transposed: bool,
        batch: [usize; 2],
    ) -> MatrixView {
        MatrixView {
            rows,
            cols,
            ld,
            transposed,
            batch: batch[0],
            batch_stride: batch[1],
        }
    }

    #[test]
    fn rows_may_be_pitched_sliced_or_swapped() {
        for (shape, strides, expected) in [
            (&[3, 5][..], &[5, 1][..], view(3, 5, 5, false, [1, 0])),
            (&[3, 5], &[8, 1], view(3, 5, 8, false, [1, 0])),
            (&[5, 3], &[1, 8], view(5, 3, 8, true, [1, 0])),
            (&[1, 5], &[99, 1], view(1, 5, 5, false, [1, 0])),
            (&[5, 1], &[7, 3], view(5, 1, 7, false, [1, 0])),
            (
                &[2, 4, 3, 5],
                &[60, 15, 5, 1],
                view(3, 5, 5, false, [8, 15]),
            ),
            (
                &[2, 1, 3, 5],
                &[40, 77, 8, 1],
                view(3, 5, 8, false, [2, 40]),
            ),
            // Heads of `[seq, batch, heads, d]`: the rows of a head are far apart.
            (
                &[2, 4, 7, 5],
                &[20, 5, 40, 1],
                view(7, 5, 40, false, [8, 5]),
            ),
            (&[4, 7, 5], &[0, 5, 1], view(7, 5, 5, false, [4, 0])),
        ] {
            assert_eq!(
                MatrixView::new(shape, strides),
                Some(expected),
                "{shape:?} {strides:?}"
            );
        }
    }

    #[test]
    fn what_no_leading_dimension_describes_is_copied() {
        for (shape, strides) in [
            (&[3, 5][..], &[10, 2][..]),
            (&[3, 5], &[0, 1]),
            (&[2, 4, 3, 5], &[15, 30, 5, 1]),
            (&[2, 0], &[1, 1]),
            (&[4], &[1]),
        ] {
            assert_eq!(
                MatrixView::new(shape, strides),
                None,
                "{shape:?} {strides:?}"
            );
        }
    }
}
