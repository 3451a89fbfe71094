//! Row operations that also accept tensors without rows.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use megaburn_collective::{CollectiveError, Group, Lane, tensors};
use megaburn_kernels::{permute, read_overlapped, unpermute};

/// Row indices, on the device.
pub(super) fn index(of: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let of: Vec<i32> = of.into_iter().map(|row| row as i32).collect();
    let len = of.len();
    Tensor::from_data(TensorData::new(of, [len]), (device, DType::I32))
}

/// [`permute`] with the first `len` indices; `len` may be 0.
pub(super) fn permute_rows(x: Tensor<2>, index: &Tensor<1, Int>, len: usize) -> Tensor<2> {
    match len {
        0 => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
        _ => permute(x, index.clone().narrow(0, 0, len)),
    }
}

/// [`unpermute`], possibly without rows.
pub(super) fn unpermute_rows(y: Tensor<2>, index: Tensor<2, Int>) -> Tensor<2> {
    match index.dims()[0] {
        0 => Tensor::empty([0, y.dims()[1]], (&y.device(), y.dtype())),
        _ => unpermute(y, index),
    }
}

/// Appends rows of zeros up to `len` rows.
pub(super) fn pad_rows(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [rows, n] = x.dims();
    if rows == len {
        return x;
    }
    let zeros = Tensor::zeros([len - rows, n], (&x.device(), x.dtype()));
    if rows == 0 {
        zeros
    } else {
        Tensor::cat(vec![x, zeros], 0)
    }
}

/// The first `len` rows.
pub(super) fn truncate_rows(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [_, n] = x.dims();
    match len {
        0 => Tensor::empty([0, n], (&x.device(), x.dtype())),
        _ => x.narrow(0, 0, len),
    }
}

/// Reshapes to this number of columns.
pub(super) fn columns(x: Tensor<2>, columns: usize) -> Tensor<2> {
    match x.shape().num_elements() {
        // Burn's `reshape` gives a size of 0 another meaning.
        0 => Tensor::empty([0, columns], (&x.device(), x.dtype())),
        len => x.reshape([len / columns, columns]),
    }
}

pub(super) fn as_row(x: Tensor<2>) -> Tensor<2> {
    let [rows, n] = x.dims();
    match rows * n {
        // Burn's `reshape` gives a size of 0 another meaning.
        0 => Tensor::empty([1, 0], (&x.device(), x.dtype())),
        len => x.reshape([1, len]),
    }
}

/// All-gathers integers to the host, concatenated rank by rank. The device runs `meanwhile` while
/// the host waits for them.
pub(super) fn exchange_counts<T>(
    own: Tensor<1, Int>,
    group: &Group,
    meanwhile: impl FnOnce() -> T,
) -> Result<(Vec<usize>, T), CollectiveError> {
    let all = if group.size() == 1 {
        own
    } else {
        tensors::all_gather(own, group, Lane::InOrder)?.wait()
    };
    let (numbers, done) = read_overlapped(all, meanwhile);
    Ok((
        numbers.into_iter().map(|number| number as usize).collect(),
        done,
    ))
}
