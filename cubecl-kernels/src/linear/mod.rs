//! The linear map of a layer, whose weight gradient can be accumulated in f32 by the product
//! itself.

mod grouped;
mod op;
mod options;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

pub(crate) use grouped::put_gradient;
pub use grouped::{GroupWeight, GroupedGemmChoice, GroupedOptions, grouped_linear};
use op::Linear;
pub use options::LinearOptions;

/// `x weight + bias`, in the dtype of `x`, accumulated in f32 (f64 for f64) whatever that dtype is.
///
/// On CUDA, forward and both gradients go through cuBLASLt, which reads `x`, `weight` and `dy` in
/// place, transposed or not. A gradient that goes to a
/// [`MainGrad`](megaburn_autograd::MainGrad) is added to it in f32 by the product itself. Elsewhere
/// the values are those of `burn::tensor::module::linear`.
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `weight`: `[in, out]`, or `[out, in]` with [`LinearOptions::out_in`]; `bias`: `[out]`
/// - result: `[.., out]`
///
/// # Panics
/// If the shapes do not fit, there is no input feature, the dtypes differ, or the main gradient
/// belongs to a weight of another shape.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<D> {
    check("linear", &x, &weight, bias.as_ref(), &options);
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    match bias {
        Some(bias) => fused(Linear(options), [x, weight, bias.into_dispatch()]),
        None => fused(Linear(options), [x, weight]),
    }
}

/// Panics unless the operands of `op` fit each other, and tells the main gradient that its weight
/// is read.
pub(crate) fn check<const D: usize>(
    op: &str,
    x: &Tensor<D>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    options: &LinearOptions,
) {
    let [rows, cols] = weight.dims();
    let [inputs, outputs] = if options.out_in {
        [cols, rows]
    } else {
        [rows, cols]
    };
    let dims = x.dims();
    let bias_len = bias.map_or(outputs, |bias| bias.dims()[0]);
    assert!(
        dims[D - 1] == inputs && bias_len == outputs && inputs > 0,
        "{op}: x {dims:?}, a weight from {inputs} to {outputs} features and a bias of \
        {bias_len} do not match",
    );
    let operands = [float("x", x), float("the weight", weight)];
    let bias_too = bias.map(|bias| float("the bias", bias));
    arg_check::check(op, operands.into_iter().chain(bias_too));
    let dtypes = [
        x.dtype(),
        weight.dtype(),
        bias.map_or(x.dtype(), Tensor::dtype),
    ];
    assert!(
        dtypes.iter().all(|&dtype| dtype == dtypes[0]),
        "{op}: x, weight and bias are {}: cast them to the same dtype",
        dtypes.map(|dtype| dtype.name()).join(", ")
    );
    if let Some(main_grad) = &options.main_grad {
        main_grad.check(op, [rows, cols]);
        main_grad.notify_use();
    }
    if let Some(bias_grad) = options.bias_grad.as_ref().filter(|_| bias.is_some()) {
        bias_grad.check(op, [1, outputs]);
    }
}
