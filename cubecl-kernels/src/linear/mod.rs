//! The linear map of a layer, with the weight's gradient summed in f32 where it is computed.

mod main_grad;
mod op;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

pub use main_grad::MainGrad;
use op::LinearOps;

/// How [`linear`] reads its weight, and where the weight's gradient goes.
#[derive(Clone, Debug, Default)]
pub struct LinearOptions {
    /// Whether the weight is `[out, in]` (Megatron, an embedding) instead of `[in, out]` (Burn).
    pub out_in: bool,
    /// Sums the weight's gradient, once attached; none: an ordinary gradient.
    pub main_grad: Option<MainGrad>,
}

/// `x weight + bias`, in the dtype of `x`, summed in f32 (f64 for f64) whatever that is.
///
/// On CUDA forward and both gradients go through cuBLASLt, which reads `x`, `weight` and `dy` where
/// they are, transposed or not; the gradient that goes to a [`MainGrad`] is added to it in f32
/// by the product itself. Elsewhere the values are those of `burn::tensor::module::linear`.
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `weight`: `[in, out]`, or `[out, in]` with [`LinearOptions::out_in`]; `bias`: `[out]`
/// - result: `[.., out]`
///
/// # Panics
/// If the shapes do not fit.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<D> {
    let [rows, cols] = weight.dims();
    let [inputs, outputs] = if options.out_in { [cols, rows] } else { [rows, cols] };
    let dims = x.dims();
    let bias_len = bias.as_ref().map_or(outputs, |bias| bias.dims()[0]);
    assert!(
        dims[D - 1] == inputs && bias_len == outputs,
        "linear: x {dims:?}, a weight from {inputs} to {outputs} features and a bias of {bias_len} do not fit",
    );
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
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
        assert_close, assert_same_bits, assert_same_function, constant, leaf, normal,
    };

    fn options(out_in: bool) -> LinearOptions {
        LinearOptions { out_in, main_grad: None }
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([4, 2, 16, 24], [7, 3, 10, 5])] sizes: [usize; 4],
        #[values(false, true)] out_in: bool,
        #[values((DType::F32, 2e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let [s, b, inputs, outputs] = sizes;
        let shape = if out_in { [outputs, inputs] } else { [inputs, outputs] };
        let x = leaf(normal([s, b, inputs]).cast(dtype));
        let (w, bias) = (leaf(normal(shape).cast(dtype)), leaf(normal([outputs]).cast(dtype)));
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
        let (x, w, bias) = (constant([5, 3, 14]), constant([14, 9]), constant([9]));
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
        let with = LinearOptions { out_in, main_grad: Some(main_grad.clone()) };
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
            let grads = (linear(x.clone(), w.clone(), None, with.clone()) * 0.5).sum().backward();
            assert!(w.grad(&grads).is_none() && x.grad(&grads).is_some());
        }
        let sum = main_grad.take().expect("three gradients");
        assert_eq!(sum.dtype(), DType::F32);
        assert_close(sum, expected.expect("three gradients"), 1e-5);
        assert!(main_grad.take().is_none());
    }

    #[test]
    #[should_panic(expected = "linear: x [2, 4], a weight from 5 to 3 features")]
    fn shapes_that_do_not_fit_are_refused() {
        linear(constant([2, 4]), constant([5, 3]), None, options(false));
    }
}
