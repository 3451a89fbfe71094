//! Inputs that backward recomputes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use megaburn_autograd::testing::{assert_refused, constant, device, leaf, normal};
use megaburn_autograd::{MainGrad, RecomputeFn};
use rstest::rstest;

use crate::{CrossEntropyOptions, LinearOptions, linear, linear_cross_entropy};

/// Runs an operation on `tanh(x)`, which is recomputed if `forgotten`. Returns the result, the
/// gradients of `x`, the weight and the bias, and how often the input was recomputed.
fn trained(
    what: &str,
    [x, w]: [Tensor<2>; 2],
    bias: Option<Tensor<1>>,
    main: &MainGrad,
    out_in: bool,
    forgotten: bool,
) -> (Vec<TensorData>, usize) {
    let x = leaf(x);
    let w = leaf(w);
    let bias = bias.map(leaf);
    let rows = x.dims()[0];
    // A view, `[2, rows, ..]` with its halves swapped.
    let view = move |x: Tensor<2>| x.reshape([rows / 2, 2, 8]).swap_dims(0, 1);
    let calls = Arc::new(AtomicUsize::new(0));
    let noted = calls.clone();
    let source = x.clone().inner();
    let again = forgotten.then(|| {
        RecomputeFn::new(move || {
            noted.fetch_add(1, Ordering::Relaxed);
            view(activation::tanh(source.clone()))
        })
    });
    let options = LinearOptions {
        out_in,
        main_grad: Some(main.clone()),
        again,
        ..Default::default()
    };
    let y = view(activation::tanh(x.clone()));
    let y = match what {
        "linear" => linear(y, w.clone(), bias.clone(), options),
        _ => {
            let ids = (0..rows).map(|i| (i % 6) as i64).collect();
            let ids = TensorData::new::<i64, _>(ids, [2, rows / 2]);
            let ids = Tensor::<2, Int>::from_data(ids, &device());
            let how = CrossEntropyOptions::new(6);
            linear_cross_entropy(y, w.clone(), ids, options, how, 3, |own| own).unsqueeze_dim(2)
        }
    };
    let found = y.clone().inner().into_data();
    let grads = (y.clone() * y).sum().backward();
    let of_w = main.take().or_else(|| w.grad(&grads)).expect("a gradient");
    let of_x = x.grad(&grads).expect("a gradient");
    let of_bias = bias
        .filter(|_| what == "linear")
        .and_then(|bias| bias.grad(&grads));
    let mut all = vec![found, of_x.into_data(), of_w.into_data()];
    all.extend(of_bias.map(Tensor::into_data));
    (all, calls.load(Ordering::Relaxed))
}

#[rstest]
fn an_input_that_is_computed_again_gives_the_same_bits(
    #[values("linear", "loss")] what: &str,
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
    #[values(true, false)] out_in: bool,
    #[values(true, false)] attached: bool,
    #[values(true, false)] with_bias: bool,
) {
    let main = MainGrad::default();
    if attached {
        main.attach();
    }
    for rows in [6, 10] {
        let shape = if out_in { [6, 8] } else { [8, 6] };
        let matrices = || [constant([rows, 8]), constant(shape)].map(|x| x.cast(dtype));
        let inputs = matrices();
        let bias = with_bias.then(|| constant([6]).cast(dtype));
        let run = |forgotten| trained(what, inputs.clone(), bias.clone(), &main, out_in, forgotten);
        let (kept, none) = run(false);
        let (found, calls) = run(true);
        assert_eq!((none, calls), (0, 1));
        assert!(kept == found, "the bits differ");
    }
}

#[test]
fn without_a_gradient_of_the_weight_nothing_is_computed_again() {
    let again = RecomputeFn::new(|| -> Tensor<2> { panic!("it was computed again") });
    let options = LinearOptions {
        again: Some(again),
        ..Default::default()
    };
    let x = normal([3, 4]);
    let w = constant([4, 5]);
    let y = linear(x.clone(), w.clone(), None, options.clone());
    assert!(x.grad(&y.sum().backward()).is_some());
    // Nor does a forward pass without autodiff recompute anything.
    let inner = linear(x.inner(), w.inner(), None, options);
    assert_eq!(inner.dims(), [3, 5]);
}

#[test]
fn no_rows_are_computed_again() {
    let x = normal([0, 2, 4]);
    let w = normal([4, 3]);
    let source = x.clone().inner();
    let again = Some(RecomputeFn::new(move || source.clone()));
    let y = linear(
        x.clone(),
        w.clone(),
        None,
        LinearOptions {
            again,
            ..Default::default()
        },
    );
    let grads = y.sum().backward();
    assert_eq!(x.grad(&grads).unwrap().dims(), [0, 2, 4]);
    assert_eq!(
        megaburn_autograd::testing::values(w.grad(&grads).unwrap()),
        [0.0; 12]
    );
}

#[rstest]
#[case([4, 4], DType::F32, "the recomputed x is [4, 4] f32, but must have the rows of [3, 4] f32")]
#[case([6, 2], DType::F32, "the recomputed x is [6, 2] f32, but must have the rows of [3, 4] f32")]
#[case([3, 4], DType::BF16, "the recomputed x is [3, 4] bf16, but must have the rows of [3, 4] f32")]
fn another_input_is_refused(
    #[case] shape: [usize; 2],
    #[case] dtype: DType,
    #[case] message: &str,
) {
    let other = constant(shape).cast(dtype).inner();
    let again = Some(RecomputeFn::new(move || other.clone()));
    let options = LinearOptions {
        again,
        ..Default::default()
    };
    let y = linear(normal([3, 4]), normal([4, 5]), None, options);
    assert_refused(|| y.sum().backward(), message);
}
