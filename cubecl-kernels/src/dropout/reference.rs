use burn::tensor::{Tensor, TensorData};

use super::DropoutKey;
use crate::primitive::compute_dtype;

/// [`dropout`](crate::dropout) by its definition: a product with the mask.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: DropoutKey) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let data = TensorData::new(key.factors(&x.dims(), p), x.shape());
    let factors = Tensor::<D>::from_data(data, &x.device()).cast(wide);
    (x.cast(wide) * factors).cast(dtype)
}
