//! Rows that are taken and put together, where there may be none.

use burn::tensor::{Device, Int, Tensor, TensorData};
use megaburn_kernels::{sum_rows, take_rows};

/// Numbers of rows, on the device.
pub(super) fn index(of: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let of: Vec<i64> = of.into_iter().map(|row| row as i64).collect();
    let len = of.len();
    Tensor::from_data(TensorData::new(of, [len]), device)
}

/// [`take_rows`], where there may be none.
pub(super) fn taken(x: Tensor<2>, index: &Tensor<1, Int>) -> Tensor<2> {
    match index.dims() {
        [0] => Tensor::empty([0, x.dims()[1]], (&x.device(), x.dtype())),
        _ => take_rows(x, index.clone()),
    }
}

/// [`sum_rows`] of `terms` each, where there may be none.
pub(super) fn summed(y: Tensor<2>, index: &Tensor<1, Int>, terms: usize) -> Tensor<2> {
    let [len] = index.dims();
    match len {
        0 => Tensor::empty([0, y.dims()[1]], (&y.device(), y.dtype())),
        _ => sum_rows(y, index.clone().reshape([len / terms, terms])),
    }
}

/// With rows of zeros behind, so that there are `len`.
pub(super) fn lengthened(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [rows, n] = x.dims();
    if rows == len {
        return x;
    }
    let zeros = Tensor::zeros([len - rows, n], (&x.device(), x.dtype()));
    if rows == 0 { zeros } else { Tensor::cat(vec![x, zeros], 0) }
}

/// The first `len` rows.
pub(super) fn shortened(x: Tensor<2>, len: usize) -> Tensor<2> {
    let [_, n] = x.dims();
    match len {
        0 => Tensor::empty([0, n], (&x.device(), x.dtype())),
        _ => x.narrow(0, 0, len),
    }
}

pub(super) fn as_row(x: Tensor<2>) -> Tensor<2> {
    let [rows, n] = x.dims();
    match rows * n {
        // A size of 0 means another one to Burn's `reshape`.
        0 => Tensor::empty([1, 0], (&x.device(), x.dtype())),
        len => x.reshape([1, len]),
    }
}
