use burn::tensor::{Tensor, TensorData};
use megaburn_autograd::backend_ops::compute_dtype;

use super::key::DropoutKey;

/// [`dropout`](crate::dropout) by its definition: multiplication by the mask.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: DropoutKey) -> Tensor<D> {
    let dtype = x.dtype();
    masked(x, p, key).cast(dtype)
}

/// [`bias_dropout_add`](crate::bias_dropout_add) by its definition.
pub fn bias_dropout_add<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    residual: Tensor<D>,
    p: f64,
    key: DropoutKey,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let x = x.cast(wide);
    let x = bias
        .into_iter()
        .fold(x, |x, bias| x + bias.cast(wide).unsqueeze());
    (residual.cast(wide) + masked(x, p, key)).cast(dtype)
}

/// Multiplies `x` by the mask, in the compute dtype.
fn masked<const D: usize>(x: Tensor<D>, p: f64, key: DropoutKey) -> Tensor<D> {
    let wide = compute_dtype(x.dtype());
    let data = TensorData::new(key.factors(&x.dims(), p), x.shape());
    x.clone().cast(wide) * Tensor::<D>::from_data(data, &x.device()).cast(wide)
}
