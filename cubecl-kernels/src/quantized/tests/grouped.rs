//! [`grouped_linear`] of quantised matrices against [`quantized_linear`] of each range.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Tensor};
use megaburn_autograd::testing::{assert_close, assert_refused, constant, leaf, normal, values};
use megaburn_autograd::{MainGrad, OverlappedWgrads, RecomputeFn};
use rstest::rstest;

use crate::quantized::{
    AmaxReduction, AmaxSource, DelayedAmax, LinearQuantization, QuantizationRecipe, Scaling,
    SmallFloat, quantized_linear,
};
use crate::{GroupWeight, GroupedOptions, LinearOptions, grouped_linear};

const SCALINGS: [Scaling; 3] = [Scaling::Tensor, Scaling::Blocks, Scaling::Microscaling];

fn quantization(scaling: Scaling) -> LinearQuantization {
    LinearQuantization::new(QuantizationRecipe {
        scaling,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    })
}

fn grouped(
    x: Tensor<2>,
    rows: &[usize],
    weights: &[Tensor<2>],
    main_grads: Option<&[MainGrad]>,
    options: GroupedOptions,
) -> Tensor<2> {
    let group = |(i, w): (usize, &Tensor<2>)| GroupWeight {
        weight: w.clone(),
        main_grad: main_grads.map(|all| all[i].clone()),
    };
    let weights = weights.iter().enumerate().map(group).collect();
    grouped_linear(x, rows, weights, options)
}

/// The ranges of rows have other magnitudes, so that a scale of all rows would give other numbers.
fn rows_of(rows: &[usize], features: usize) -> Tensor<2> {
    let parts = rows.iter().enumerate().filter(|(_, rows)| **rows > 0);
    let parts = parts.map(|(i, rows)| constant([*rows, features]) * 3.0f32.powi(i as i32));
    Tensor::cat(parts.collect(), 0)
}

#[rstest]
fn values_and_gradients_are_those_of_separate_maps(
    #[values(&[3, 0, 5], &[0, 40, 0], &[1, 33, 2, 6])] rows: &[usize],
    #[values(false, true)] attached: bool,
    #[values(false, true)] forgotten: bool,
    #[values((DType::F32, 1e-6), (DType::BF16, 1e-2))] (dtype, tolerance): (DType, f64),
) {
    for (scaling, [inputs, outputs]) in SCALINGS.into_iter().zip([[6, 4], [35, 9], [33, 34]]) {
        let x = leaf(rows_of(rows, inputs).cast(dtype));
        let weight = |i: usize| leaf((normal([inputs, outputs]) * (i + 1) as f32).cast(dtype));
        let weights: Vec<_> = (0..rows.len()).map(weight).collect();
        let main_grads: Vec<_> = rows.iter().map(|_| MainGrad::default()).collect();
        if attached {
            main_grads.iter().for_each(MainGrad::attach);
        }
        let source = x.clone().inner();
        let options = GroupedOptions {
            again: forgotten.then(|| RecomputeFn::new(move || source.clone())),
            quantizations: vec![quantization(scaling); rows.len()],
            ..Default::default()
        };
        let y = grouped(x.clone(), rows, &weights, Some(&main_grads), options);
        let dy = rows_of(rows, outputs).cast(dtype);
        let grads = (y.clone() * dy.clone()).sum().backward();
        let dx = x.grad(&grads).unwrap();
        let mut first = 0;
        for (i, (w, len)) in weights.iter().zip(rows).enumerate() {
            let found = match attached {
                true => main_grads[i].take().unwrap(),
                false => w.grad(&grads).unwrap().cast(DType::F32),
            };
            if *len == 0 {
                assert_eq!(values(found), vec![0.0; inputs * outputs]);
                continue;
            }
            let part = |x: Tensor<2>| x.narrow(0, first, *len);
            let own = leaf(Tensor::from_inner(part(x.clone().inner())));
            let w = leaf(w.clone());
            let options = LinearOptions::default();
            let expected =
                quantized_linear(own.clone(), w.clone(), None, options, quantization(scaling));
            assert_close(part(y.clone().inner()), expected.clone().inner(), tolerance);
            let grads = (expected * part(dy.clone())).sum().backward();
            assert_close(part(dx.clone()), own.grad(&grads).unwrap(), tolerance);
            assert_close(found, w.grad(&grads).unwrap().cast(DType::F32), tolerance);
            first += len;
        }
    }
}

/// One reduction has the magnitudes of all ranges, and its results are the ones that scales follow.
#[test]
fn ranges_are_reduced_together() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let rows = [2, 0, 3];
    let source = |factor: f32| {
        let calls = calls.clone();
        AmaxSource::Current(Some(AmaxReduction::new(move |own| {
            calls.lock().unwrap().push(values(own.clone()));
            own * factor
        })))
    };
    let x = leaf(rows_of(&rows, 7));
    let weights = [0; 3].map(|_| leaf(normal([7, 5])));
    let run = |factor| {
        let quantization = LinearQuantization {
            input: source(factor),
            gradient: source(factor),
            ..quantization(Scaling::Tensor)
        };
        let options = GroupedOptions {
            quantizations: vec![quantization; 3],
            ..Default::default()
        };
        let y = grouped(x.clone(), &rows, &weights, None, options);
        let found = values(y.clone());
        y.sum().backward();
        (found, std::mem::take(&mut *calls.lock().unwrap()))
    };
    let (own, calls_of_own) = run(1.0);
    let largest = |first, len| values(x.clone().inner().narrow(0, first, len).abs().max())[0];
    assert_eq!(
        calls_of_own,
        [vec![largest(0, 2), 0.0, largest(2, 3)], vec![1.0, 0.0, 1.0]]
    );
    let (other, _) = run(1.3);
    assert_ne!(own, other);
}

/// Delayed scaling records each range under its own matrix, and a matrix without a step before
/// follows itself.
#[test]
fn delayed_scales_are_those_of_their_matrices() {
    let all = [0; 3].map(|_| DelayedAmax::new(None));
    let amax = |x: f64| Some(Tensor::<1>::from_floats([x], &burn::tensor::Device::flex()));
    let rows = [2, 0, 1];
    let x = constant([3, 8]).inner();
    let weights = [0; 3].map(|_| constant([8, 4]).inner());
    let of = |input: fn(&DelayedAmax) -> AmaxSource| {
        let of = |delayed| LinearQuantization {
            input: input(delayed),
            ..quantization(Scaling::Tensor)
        };
        let options = GroupedOptions {
            quantizations: all.iter().map(of).collect(),
            ..Default::default()
        };
        let weights = weights.clone().map(Tensor::from_inner);
        grouped(
            Tensor::from_inner(x.clone()),
            &rows,
            &weights,
            None,
            options,
        )
        .inner()
    };
    let delayed = || of(|delayed| AmaxSource::Delayed(delayed.clone()));
    let own = values(of(|_| AmaxSource::default()));
    assert_eq!(values(delayed()), own);
    assert_eq!(values(delayed()), own);
    let largest = |first, len| values(x.clone().narrow(0, first, len).abs().max())[0];
    let recorded = all
        .clone()
        .map(|delayed| values(delayed.take_current().unwrap())[0]);
    assert_eq!(recorded, [largest(0, 2), 0.0, largest(2, 1)]);
    // A scale for magnitudes of up to a tenth saturates the larger ones.
    all[0].set_derived(amax(largest(0, 2) * 0.1));
    let found = values(delayed());
    assert_ne!(found[..8], own[..8]);
    assert_eq!(found[8..], own[8..]);
    // An evaluation records nothing.
    all.iter().for_each(|delayed| drop(delayed.take_current()));
    let options = GroupedOptions {
        quantizations: all
            .iter()
            .map(|delayed| LinearQuantization {
                input: AmaxSource::Delayed(delayed.clone()),
                ..quantization(Scaling::Tensor)
            })
            .collect(),
        ..Default::default()
    };
    let y = grouped(x.clone(), &rows, &weights, None, options);
    assert_eq!(values(y), found);
    assert!(all.iter().all(|delayed| delayed.take_current().is_none()));
}

#[test]
fn gradients_put_beside_something_are_there_when_they_are_computed() {
    let x = leaf(normal([3, 4]));
    let weights = [0; 2].map(|_| leaf(normal([4, 2])));
    let run = |overlapped_wgrads: Option<OverlappedWgrads>| {
        let sums = [0; 2].map(|_| MainGrad::default());
        sums.iter().for_each(MainGrad::attach);
        let options = GroupedOptions {
            overlapped_wgrads,
            quantizations: vec![quantization(Scaling::Tensor); 2],
            ..Default::default()
        };
        let y = grouped(x.clone(), &[2, 1], &weights, Some(&sums), options);
        y.sum().backward();
        sums
    };
    let expected = run(None).map(|sum| values(sum.take().unwrap()));
    let overlapped_wgrads = OverlappedWgrads::default();
    let found = run(Some(overlapped_wgrads.clone()));
    assert!(found.iter().all(|sum| sum.take().is_none()));
    overlapped_wgrads.compute();
    assert_eq!(found.map(|sum| values(sum.take().unwrap())), expected);
}

#[test]
fn no_rows_at_all_give_gradients_of_0() {
    let x = leaf(normal([0, 4]));
    let weights = [0; 2].map(|_| leaf(normal([4, 3])));
    let options = || GroupedOptions {
        quantizations: vec![quantization(Scaling::Tensor); 2],
        ..Default::default()
    };
    let y = grouped(x, &[0, 0], &weights, None, options());
    assert_eq!(y.dims(), [0, 3]);
    let grads = y.sum().backward();
    let of_weight = |w: &Tensor<2>| values(w.grad(&grads).unwrap());
    weights
        .iter()
        .for_each(|w| assert_eq!(of_weight(w), [0.0; 12]));
    // A frozen matrix has no gradient, and the rows of another are quantised for it alone.
    let frozen = constant([4, 3]);
    let trained = weights[1].clone();
    let x = constant([3, 4]);
    let y = grouped(x, &[1, 2], &[frozen, trained.clone()], None, options());
    assert!(trained.grad(&y.sum().backward()).is_some());
}

#[test]
fn quantizations_that_do_not_fit_are_refused() {
    let run = |scalings: &[Scaling]| {
        let options = GroupedOptions {
            quantizations: scalings.iter().map(|of| quantization(*of)).collect(),
            ..Default::default()
        };
        let weights = [0; 2].map(|_| constant([4, 3]));
        grouped(constant([3, 4]), &[1, 2], &weights, None, options)
    };
    assert_refused(
        || run(&[Scaling::Tensor]),
        "grouped_linear: 1 quantizations do not match 2 matrices",
    );
    assert_refused(
        || run(&[Scaling::Tensor, Scaling::Blocks]),
        "quantised by different recipes",
    );
}
