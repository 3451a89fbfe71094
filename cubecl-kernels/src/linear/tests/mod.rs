//! Tests of [`linear`], and of what it does with main gradients, queues and recomputed inputs.

mod main_grad;
mod recompute_fn;
mod wgrad_queue;

use burn::tensor::{DType, module};
use megaburn_autograd::MainGrad;
use megaburn_autograd::testing::{
    assert_close, assert_refused, assert_same_bits, assert_same_function, constant, leaf, normal,
    quantized, values,
};
use rstest::rstest;

use super::*;
use crate::reference;

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
