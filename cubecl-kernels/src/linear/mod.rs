//! The linear map of a layer, whose weight gradient can be accumulated in f32 by the product
//! itself.

mod bucket_slice;
mod deferred;
mod group_gradients;
mod grouped;
mod grouped_products;
mod joined;
mod main_grad;
mod op;
mod overlapped_wgrads;
mod recompute_fn;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::arg_check::{self, float};
pub use bucket_slice::{bucket_slice, is_view_of};
pub use deferred::{WgradQueue, without_deferral};
pub use grouped::{GroupWeight, GroupedOptions, grouped_linear};
pub use grouped_products::{GroupedGemmChoice, set_grouped_gemm};
pub use main_grad::{LinearPass, MainGrad};
use op::LinearOps;
pub use overlapped_wgrads::OverlappedWgrads;
pub use recompute_fn::RecomputeFn;
pub(crate) use recompute_fn::SavedInput;

/// How [`linear`] reads its weight, where its gradients go, and whether the input is recomputed.
#[derive(Clone, Debug, Default)]
pub struct LinearOptions {
    /// Whether the weight is `[out, in]` (Megatron, an embedding) instead of `[in, out]` (Burn).
    pub out_in: bool,
    /// Accumulates the weight's gradient once attached; `None` gives an ordinary gradient.
    pub main_grad: Option<MainGrad>,
    /// Accumulates the bias's gradient once attached, as `[1, out]`; `None` gives an ordinary
    /// gradient.
    pub bias_grad: Option<MainGrad>,
    /// Recomputes the input for the weight's gradient, its only use in backward; `None` saves the
    /// input.
    pub again: Option<RecomputeFn>,
}

/// `x weight + bias`, in the dtype of `x`, accumulated in f32 (f64 for f64) whatever that dtype is.
///
/// On CUDA, forward and both gradients go through cuBLASLt, which reads `x`, `weight` and `dy` in
/// place, transposed or not. A gradient that goes to a [`MainGrad`] is added to it in f32 by the
/// product itself. Elsewhere the values are those of `burn::tensor::module::linear`.
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
    let [rows, cols] = weight.dims();
    let [inputs, outputs] = if options.out_in {
        [cols, rows]
    } else {
        [rows, cols]
    };
    let dims = x.dims();
    let bias_len = bias.as_ref().map_or(outputs, |bias| bias.dims()[0]);
    assert!(
        dims[D - 1] == inputs && bias_len == outputs && inputs > 0,
        "linear: x {dims:?}, a weight from {inputs} to {outputs} features and a bias of \
        {bias_len} do not match",
    );
    let operands = [float("x", &x), float("the weight", &weight)];
    let bias_too = bias.as_ref().map(|bias| float("the bias", bias));
    arg_check::check("linear", operands.into_iter().chain(bias_too));
    let dtypes = [
        x.dtype(),
        weight.dtype(),
        bias.as_ref().map_or(x.dtype(), Tensor::dtype),
    ];
    assert!(
        dtypes.iter().all(|&dtype| dtype == dtypes[0]),
        "linear: x, weight and bias are {}: cast them to the same dtype",
        dtypes.map(|dtype| dtype.name()).join(", ")
    );
    if let Some(main_grad) = &options.main_grad {
        main_grad.check("linear", [rows, cols]);
        main_grad.notify_use();
    }
    if let Some(bias_grad) = options.bias_grad.as_ref().filter(|_| bias.is_some()) {
        bias_grad.check("linear", [1, outputs]);
    }
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    Tensor::from_dispatch(match bias {
        Some(bias) => <Dispatch as LinearOps>::affine_map(x, weight, bias.into_dispatch(), options),
        None => <Dispatch as LinearOps>::linear_map(x, weight, options),
    })
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, module};
    use rstest::rstest;

    use super::*;
    use crate::reference;
    use crate::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, leaf,
        normal, quantized, values,
    };

    fn options(out_in: bool) -> LinearOptions {
        LinearOptions {
            out_in,
            ..Default::default()
        }
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16, 24], [7, 3, 10, 5])] sizes: [usize; 4],
        #[values(false, true)] out_in: bool,
        #[values((DType::F32, 2e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let [s, b, inputs, outputs] = sizes;
        let shape = if out_in {
            [outputs, inputs]
        } else {
            [inputs, outputs]
        };
        let x = leaf(normal([s, b, inputs]).cast(dtype));
        let w = leaf(normal(shape).cast(dtype));
        let bias = leaf(normal([outputs]).cast(dtype));
        assert_same_function!(
            tolerance,
            [x, w],
            linear(x.clone(), w.clone(), None, options(out_in)),
            reference::linear(x.clone(), w.clone(), None, options(out_in))
        );
        assert_same_function!(
            tolerance,
            [x, w, bias],
            linear(x.clone(), w.clone(), Some(bias.clone()), options(out_in)),
            reference::linear(x.clone(), w.clone(), Some(bias.clone()), options(out_in))
        );
    }

    #[test]
    fn f32_results_are_bit_for_bit_those_of_burn() {
        let x = constant([5, 3, 14]);
        let w = constant([14, 9]);
        let bias = constant([9]);
        let ours = linear(x.clone(), w.clone(), Some(bias.clone()), options(false));
        assert_same_bits(ours, module::linear(x, w, Some(bias)));
    }

    #[rstest]
    #[case(DType::F32, false)]
    #[case(DType::BF16, false)]
    #[case(DType::BF16, true)]
    fn an_attached_main_grad_takes_the_gradients_sum(#[case] dtype: DType, #[case] out_in: bool) {
        let shape = if out_in { [6, 8] } else { [8, 6] };
        let w = leaf(normal(shape).cast(dtype));
        let main_grad = MainGrad::default();
        let with = LinearOptions {
            out_in,
            main_grad: Some(main_grad.clone()),
            ..Default::default()
        };
        let mut expected = None;
        for round in 0..3 {
            let x = leaf(normal([4, 2, 8]).cast(dtype));
            let wide = |t: Tensor<3>| leaf(t.cast(DType::F32));
            let exact = leaf(w.clone().cast(DType::F32));
            let y = linear(wide(x.clone()), exact.clone(), None, options(out_in));
            let dw = exact.grad(&(y * 0.5).sum().backward()).expect("a gradient");
            expected = Some(expected.map_or(dw.clone(), |sum: Tensor<2>| sum + dw));
            if round == 0 {
                // Not attached yet: an ordinary gradient.
                let y = linear(x.clone(), w.clone(), None, with.clone());
                assert!(w.grad(&(y * 0.5).sum().backward()).is_some());
                assert!(main_grad.take().is_none());
                main_grad.attach();
            }
            let grads = (linear(x.clone(), w.clone(), None, with.clone()) * 0.5)
                .sum()
                .backward();
            assert!(w.grad(&grads).is_none() && x.grad(&grads).is_some());
        }
        let sum = main_grad.take().expect("three gradients");
        assert_eq!(sum.dtype(), DType::F32);
        assert_close(sum, expected.expect("three gradients"), 1e-5);
        assert!(main_grad.take().is_none());
    }

    #[test]
    fn views_give_what_the_reference_gives() {
        let x = normal([3, 5, 9]);
        let w = normal([9, 12]);
        let bias = normal([1]);
        let all = |linear: Op| {
            let x = x.clone().swap_dims(0, 1).narrow(2, 1, 8);
            let w = w.clone().narrow(0, 1, 8).narrow(1, 3, 7);
            linear(x, w, Some(bias.clone().expand([7])), options(false))
        };
        assert_same_function!(2e-6, [x, w, bias], all(linear), all(reference::linear));
    }

    type Op = fn(Tensor<3>, Tensor<2>, Option<Tensor<1>>, LinearOptions) -> Tensor<3>;

    #[rstest]
    fn no_rows_give_none_and_gradients_of_0(#[values(false, true)] attached: bool) {
        let x = normal([0, 2, 4]);
        let w = normal([4, 3]);
        let bias = normal([3]);
        let main_grad = MainGrad::default();
        if attached {
            main_grad.attach();
        }
        let with = LinearOptions {
            main_grad: Some(main_grad.clone()),
            ..Default::default()
        };
        let y = linear(x.clone(), w.clone(), Some(bias.clone()), with);
        assert_eq!(y.dims(), [0, 2, 3]);
        let grads = y.sum().backward();
        assert_eq!(x.grad(&grads).unwrap().dims(), [0, 2, 4]);
        let dw = if attached {
            main_grad.take()
        } else {
            w.grad(&grads)
        };
        assert_eq!(values(dw.unwrap()), [0.0; 12]);
        assert_eq!(values(bias.grad(&grads).unwrap()), [0.0; 3]);
    }

    fn of_two_weights() {
        let main_grad = MainGrad::default();
        main_grad.attach();
        for outputs in [3, 5] {
            let with = LinearOptions {
                main_grad: Some(main_grad.clone()),
                ..Default::default()
            };
            linear(normal([2, 4]), normal([4, outputs]), None, with)
                .sum()
                .backward();
        }
    }

    #[rstest]
    #[case(|| drop(linear(normal([2, 4]), normal([5, 3]), None, options(false))), "linear: x [2, 4], a weight from 5 to 3 features")]
    #[case(|| drop(linear(normal([2, 3]), normal([5, 3]), None, options(false))), "x [2, 3], a weight from 5 to 3 features")]
    #[case(|| drop(linear(normal([2, 4]), normal([4, 3]), Some(normal([1])), options(false))), "a bias of 1 do not match")]
    #[case(|| drop(linear(normal([2, 0]), normal([0, 3]), None, options(false))), "a weight from 0 to 3 features")]
    #[case(|| drop(linear(normal([2, 4]), quantized([4, 4]), None, options(false))), "linear: the weight is qfloat")]
    #[case(
        || drop(linear(normal([2, 4]), normal([4, 3]).cast(DType::BF16), None, options(false))),
        "linear: x, weight and bias are f32, bf16, f32: cast them to the same dtype"
    )]
    #[case(
        || drop(linear(normal([2, 4]), normal([4, 3]), Some(normal([3]).cast(DType::F16)), options(false))),
        "x, weight and bias are f32, f32, f16"
    )]
    #[case(
        of_two_weights,
        "linear: the main gradient is for a weight [4, 3], not [4, 5]"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
