use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::compute_dtype;

use super::options::LinearOptions;

/// [`linear`](crate::linear) by its definition.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<D> {
    let (dtype, wide) = (x.dtype(), compute_dtype(x.dtype()));
    let weight = if options.out_in {
        weight.transpose()
    } else {
        weight
    };
    let y = x.cast(wide).matmul(weight.cast(wide).unsqueeze());
    let y = match bias {
        Some(bias) => y + bias.cast(wide).unsqueeze(),
        None => y,
    };
    y.cast(dtype)
}
