//! [`quantized_linear`] against its definition.

mod grouped;
mod shards;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Tensor};
use megaburn_autograd::testing::{assert_close, constant, leaf, normal, values};
use megaburn_autograd::{MainGrad, RecomputeFn};
use rstest::rstest;

use super::*;

fn recipe(scaling: Scaling, gradients: SmallFloat) -> QuantizationRecipe {
    if let Scaling::Nvfp4(parts) = scaling {
        return QuantizationRecipe::nvfp4(parts);
    }
    QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients,
        power_of_two_scales: false,
    }
}

const ALL_PARTS: Nvfp4 = Nvfp4 {
    stochastic_rounding: true,
    random_hadamard: true,
    two_dimensional_weights: true,
};
const NO_PARTS: Nvfp4 = Nvfp4 {
    stochastic_rounding: false,
    random_hadamard: false,
    two_dimensional_weights: false,
};

const SCALINGS: [Scaling; 5] = [
    Scaling::Tensor,
    Scaling::Blocks,
    Scaling::Microscaling,
    Scaling::Nvfp4(ALL_PARTS),
    Scaling::Nvfp4(NO_PARTS),
];

#[rstest]
fn numbers_are_the_nearest_of_their_block(
    #[values([1, 1], [33, 130], [140, 45])] shape: [usize; 2],
    #[values(MatrixRole::Input, MatrixRole::Weight, MatrixRole::Gradient)] role: MatrixRole,
    #[values(SummedDim::Rows, SummedDim::Cols)] summed: SummedDim,
) {
    for scaling in SCALINGS {
        let recipe = recipe(scaling, SmallFloat::E5m2);
        let x = constant(shape).inner() * 3.0;
        let found = quantized_numbers(x.clone(), recipe, role, summed);
        assert_close(found, reference::numbers_of(x, recipe, role, summed), 1e-6);
    }
}

#[rstest]
fn the_products_are_those_of_quantised_matrices(
    #[values([3, 2, 40, 24], [7, 19, 131, 9])] sizes: [usize; 4],
    #[values(false, true)] out_in: bool,
    #[values(SmallFloat::E4m3, SmallFloat::E5m2)] gradients: SmallFloat,
    #[values(false, true)] attached: bool,
    #[values((DType::F32, 2e-6), (DType::BF16, 1e-2))] (dtype, tolerance): (DType, f64),
) {
    let [s, b, inputs, outputs] = sizes;
    for scaling in SCALINGS {
        let recipe = recipe(scaling, gradients);
        let x = leaf(normal([s, b, inputs]).cast(dtype));
        let w = normal([inputs, outputs]).cast(dtype);
        let w = leaf(if out_in { w.transpose() } else { w });
        let bias = leaf(normal([outputs]).cast(dtype));
        let main_grad = MainGrad::default();
        if attached {
            main_grad.attach();
        }
        let again = attached.then(|| {
            let x = x.clone().inner();
            RecomputeFn::new(move || x.clone())
        });
        let options = LinearOptions {
            out_in,
            main_grad: Some(main_grad.clone()),
            again,
            ..Default::default()
        };
        let quantization = LinearQuantization::new(recipe);
        let y = quantized_linear(
            x.clone(),
            w.clone(),
            Some(bias.clone()),
            options,
            quantization,
        );
        let dy = constant([s, b, outputs]).cast(dtype);
        let grads = (y.clone() * dy.clone()).sum().backward();

        use MatrixRole::{Gradient, Input, Weight};
        use SummedDim::{Cols, Rows};
        let q = |x: Tensor<2>, role, summed| reference::numbers_of(x, recipe, role, summed);
        let wide = |x: Tensor<2>| x.cast(DType::F32);
        let x2 = wide(x.clone().inner().reshape([s * b, inputs]));
        let w2 = wide(w.clone().inner());
        let w2 = if out_in { w2.transpose() } else { w2 };
        let dy2 = wide(dy.inner().reshape([s * b, outputs]));
        let expected = q(x2.clone(), Input, Cols).matmul(q(w2.clone(), Weight, Rows));
        let expected = expected + wide(bias.clone().inner().unsqueeze());
        let y = wide(y.inner().reshape([s * b, outputs]));
        assert_close(y, expected, tolerance);
        let dx = q(dy2.clone(), Gradient, Cols).matmul(q(w2, Weight, Cols).transpose());
        let found = x.grad(&grads).unwrap().reshape([s * b, inputs]);
        assert_close(wide(found), dx, tolerance);
        let dw = q(x2, Input, Rows)
            .transpose()
            .matmul(q(dy2.clone(), Gradient, Rows));
        let found = main_grad.take().or_else(|| w.grad(&grads)).unwrap();
        let found = wide(if out_in { found.transpose() } else { found });
        assert_close(found, dw, tolerance);
        let found = bias.grad(&grads).unwrap().cast(DType::F32);
        assert_close(found, dy2.sum_dim(0).squeeze(), tolerance);
    }
}

#[test]
fn what_is_not_finite_is_not_lost() {
    for scaling in SCALINGS {
        for broken in [f32::INFINITY, f32::NAN] {
            let x = constant([4, 32]).inner();
            let hole = Tensor::full([1, 1], broken, &x.device());
            let x = x.slice_assign([2..3, 5..6], hole);
            let recipe = recipe(scaling, SmallFloat::E5m2);
            let w = constant([32, 8]).inner();
            let quantization = LinearQuantization::new(recipe);
            let y = quantized_linear(x, w, None, LinearOptions::default(), quantization);
            let row = values(y.narrow(0, 2, 1));
            assert!(row.iter().all(|y| y.is_nan()), "{scaling:?}");
        }
    }
}

/// Parts of a matrix on several ranks are quantised as one by a reduction that has the largest.
#[test]
fn a_reduction_changes_the_scale() {
    let recipe = recipe(Scaling::Tensor, SmallFloat::E5m2);
    let [x, w] = [constant([5, 16]).inner(), constant([16, 8]).inner()];
    let whole = Tensor::cat(vec![x.clone(), x.clone() * 3.7], 0);
    let linear = |x, input| {
        let quantization = LinearQuantization {
            input,
            ..LinearQuantization::new(recipe)
        };
        quantized_linear(x, w.clone(), None, LinearOptions::default(), quantization)
    };
    let expected = linear(whole.clone(), AmaxSource::default()).narrow(0, 0, 5);
    let of_whole = whole.abs().max();
    let reduction = AmaxReduction::new(move |own| own.max_pair(of_whole.clone()));
    let found = linear(x.clone(), AmaxSource::Current(Some(reduction)));
    assert_close(found.clone(), expected, 1e-6);
    let alone = values(linear(x, AmaxSource::default()));
    assert_ne!(alone, values(found));
}

/// A magnitude that another operation has found is taken once, and reduced like the layer's own.
#[test]
fn a_magnitude_that_was_found_is_used() {
    type Backend = burn::backend::Flex;
    let recipe = recipe(Scaling::Tensor, SmallFloat::E5m2);
    let [x, w] = [leaf(normal([5, 16])), constant([16, 8])];
    let run = |[input, gradient]: [Option<f64>; 2], factor: f64| {
        let put = |amax: Option<f64>| {
            let found = FoundAmax::default();
            let amax = amax.map(|amax| Tensor::<1>::from_floats([amax], &x.device().inner()));
            let unwrap = <Backend as megaburn_autograd::IntoPrimitive>::unwrap::<1>;
            amax.into_iter()
                .for_each(|amax| found.put::<Backend>(unwrap(amax)));
            Some(found)
        };
        let options = LinearOptions {
            found: FoundAmaxes {
                input: put(input),
                gradient: put(gradient),
            },
            ..Default::default()
        };
        let reduction = AmaxReduction::new(move |own| own * factor);
        let quantization = LinearQuantization {
            input: AmaxSource::Current(Some(reduction)),
            ..LinearQuantization::new(recipe)
        };
        let y = quantized_linear(x.clone(), w.clone(), None, options, quantization);
        let grads = y.clone().sum().backward();
        (values(y), values(x.grad(&grads).unwrap()))
    };
    let largest = values(x.clone().inner().abs().max())[0];
    let own = run([None; 2], 1.0);
    assert_eq!(run([Some(largest), Some(1.0)], 1.0), own);
    assert_eq!(run([Some(largest / 2.0), None], 2.0), own);
    assert_ne!(run([Some(largest / 2.0), None], 1.0).0, own.0);
    assert_ne!(run([None, Some(0.3)], 1.0).1, own.1);
}

/// How often a weight was quantised is the number of times that its reduction was called.
#[test]
fn a_weight_is_quantised_once_while_it_does_not_change() {
    let recipe = recipe(Scaling::Tensor, SmallFloat::E5m2);
    let [x, w] = [leaf(normal([5, 16])), leaf(normal([16, 8]))];
    let span = WeightSpan::default();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let reduction = AmaxReduction::new(move |own| {
        count.fetch_add(1, Ordering::Relaxed);
        own
    });
    let quantization = LinearQuantization {
        weight: AmaxSource::Current(Some(reduction)),
        kept: Some(KeptWeight::new(&span)),
        ..LinearQuantization::new(recipe)
    };
    let run = |w: &Tensor<2>, options: LinearOptions| {
        let y = quantized_linear(x.clone(), w.clone(), None, options, quantization.clone());
        let grads = y.clone().sum().backward();
        let found = [values(y), values(x.grad(&grads).unwrap())];
        (found, calls.swap(0, Ordering::Relaxed))
    };
    let plain = || LinearOptions::default();
    let (expected, num_calls) = run(&w, plain());
    assert_eq!(num_calls, 2);
    let other = leaf(w.clone() * 2.0);
    let (doubled, _) = run(&other, plain());
    for (w, expected) in [(&w, &expected), (&other, &doubled)] {
        let _unchanged = span.unchanged();
        assert_eq!(run(w, plain()), (expected.clone(), 1));
        assert_eq!(run(w, plain()), (expected.clone(), 0));
        // A weight from elsewhere is read for each pass.
        let main_grad = MainGrad::default();
        let source = w.clone().inner();
        main_grad.with_source(move |_| source.clone());
        let options = LinearOptions {
            main_grad: Some(main_grad),
            ..Default::default()
        };
        assert_eq!(run(w, options), (expected.clone(), 2));
    }
    assert_eq!(run(&w, plain()), (expected, 2));
}
