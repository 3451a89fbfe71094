//! The largest magnitudes that norms find.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::testing::{assert_same_bits, constant, leaf, normal, values};
use rstest::rstest;

use crate::{FoundAmax, NormAmaxes, NormOptions};
use crate::{layer_norm_add, layer_norm_with, rms_norm_add, rms_norm_with};

/// The result of a norm and the gradient of its input, with the largest magnitudes that were found if
/// there are options for them. `others` are the residual and the gradient of the result.
fn run(
    x: &Tensor<3>,
    others: &[Tensor<3>; 2],
    [centered, adds]: [bool; 2],
    gamma: &Tensor<1>,
    amaxes: NormAmaxes,
) -> [Tensor<3>; 2] {
    let options = NormOptions::new(1e-3).with_amaxes(amaxes);
    let x = leaf(x.clone());
    let gamma = gamma.clone();
    let [residual, dy] = others.clone().map(|other| other.cast(x.dtype()));
    let (y, sum) = match (centered, adds) {
        (false, false) => (rms_norm_with(x.clone(), gamma, options), None),
        (true, false) => (layer_norm_with(x.clone(), gamma, None, options), None),
        (false, true) => {
            let (y, sum) = rms_norm_add(x.clone(), residual, gamma, options);
            (y, Some(sum))
        }
        (true, true) => {
            let (y, sum) = layer_norm_add(x.clone(), residual, gamma, None, options);
            (y, Some(sum))
        }
    };
    let loss = (y.clone() * dy).sum();
    let loss = match sum {
        Some(sum) => loss + sum.exp().sum(),
        None => loss,
    };
    let dx = x.grad(&loss.backward()).unwrap();
    [y.inner(), dx]
}

fn found() -> NormAmaxes {
    NormAmaxes {
        result: Some(FoundAmax::default()),
        gradient: Some(FoundAmax::default()),
    }
}

/// The magnitudes that were found, of result and gradient.
fn magnitudes(amaxes: &NormAmaxes) -> [f64; 2] {
    [&amaxes.result, &amaxes.gradient].map(|of| {
        let amax = of.as_ref().and_then(FoundAmax::value);
        values(amax.expect("it was found"))[0]
    })
}

#[rstest]
fn found_magnitudes_are_those_of_result_and_gradient(
    #[values([5, 3, 8], [7, 1, 33], [0, 3, 4])] shape: [usize; 3],
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(true, false)] centered: bool,
    #[values(true, false)] adds: bool,
) {
    let x = (normal(shape) * 3.0).cast(dtype);
    let gamma = normal([shape[2]]);
    let others = [constant(shape), constant(shape)];
    let plain = run(&x, &others, [centered, adds], &gamma, NormAmaxes::default());
    let amaxes = found();
    let observed = run(&x, &others, [centered, adds], &gamma, amaxes.clone());
    let largest = |of: Tensor<3>| {
        values(of)
            .into_iter()
            .fold(0.0, |most: f64, x| most.max(x.abs()))
    };
    assert_eq!(magnitudes(&amaxes), observed.clone().map(largest));
    let [y, dx] = plain;
    let [found_y, found_dx] = observed;
    assert_same_bits(found_y, y);
    assert_same_bits(found_dx, dx);
}

#[test]
fn a_norm_without_autodiff_finds_that_of_its_result() {
    let x = normal([4, 2, 9]).inner();
    for centered in [true, false] {
        let amaxes = found();
        let options = NormOptions::new(1e-3).with_amaxes(amaxes.clone());
        let gamma = normal([9]).inner();
        let y = match centered {
            true => layer_norm_with(x.clone(), gamma, None, options),
            false => rms_norm_with(x.clone(), gamma, options),
        };
        let largest = values(y.abs().max());
        assert_eq!(values(amaxes.result.unwrap().value().unwrap()), largest);
        assert!(amaxes.gradient.unwrap().value().is_none());
    }
}

#[rstest]
#[case::infinite([1.0, f32::INFINITY, 1.0], 0.5, |amax: f64| amax == f64::INFINITY)]
#[case::not_a_number([1.0, 1.0, 1.0], f32::NAN, f64::is_nan)]
fn what_is_not_finite_is_found(
    #[case] gamma: [f32; 3],
    #[case] first: f32,
    #[case] is_right: fn(f64) -> bool,
) {
    let device = normal([1]).device();
    let x = Tensor::<1>::from_floats([first, 2.0, -1.0, 0.5, -3.0, 4.0], &device);
    let amaxes = found();
    let gamma = Tensor::from_floats(gamma, &device);
    let others = [constant([2, 1, 3]), constant([2, 1, 3])];
    let x = x.reshape([2, 1, 3]);
    run(&x, &others, [false, true], &gamma, amaxes.clone());
    let [result, _] = magnitudes(&amaxes);
    assert!(is_right(result), "{result}");
}

/// Where only the sum has a gradient, that gradient is the input's, which no kernel writes.
#[test]
fn a_gradient_that_the_norm_does_not_write_is_not_found() {
    let x = leaf(normal([3, 2, 4]));
    let amaxes = found();
    let options = NormOptions::new(1e-3).with_amaxes(amaxes.clone());
    let (_, sum) = rms_norm_add(x.clone(), constant([3, 2, 4]), normal([4]), options);
    assert!(x.grad(&sum.sum().backward()).is_some());
    assert!(amaxes.gradient.unwrap().value().is_none());
}
