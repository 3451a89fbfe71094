//! Checks of a step and its buffers before anything is launched. All panic on failure.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::arg_check::{self, ArgCheck, float};

/// Checks that numbers are finite and at least 0.
pub(super) fn non_negative<const K: usize>(name: &str, numbers: [(&str, f64); K]) {
    for (what, number) in numbers {
        let fits = number >= 0.0 && number.is_finite();
        assert!(
            fits,
            "{name}: {what} {number} is not a finite number of at least 0"
        );
    }
}

/// Checks the decay rates of means.
pub(super) fn betas(name: &str, betas: [(&str, f64); 2]) {
    for (what, beta) in betas {
        assert!(
            (0.0..1.0).contains(&beta),
            "{name}: {what} {beta} is not in [0, 1)"
        );
    }
}

pub(super) fn finite(name: &str, (what, number): (&str, f64)) {
    assert!(
        number.is_finite(),
        "{name}: {what} {number} is not a finite number"
    );
}

/// Checks a buffer of the optimizer: f32 or narrower.
pub(super) fn kept(name: &'static str, x: &Tensor<1>) -> ArgCheck {
    float(name, x).of(&[DType::F32, DType::BF16, DType::F16])
}

/// Checks a factor on the device: one f32 number.
pub(super) fn one(name: &str, factor: &Tensor<1>) -> ArgCheck {
    let dims = factor.dims();
    assert!(
        dims == [1],
        "{name}: the factor on the device must be [1], not {dims:?}"
    );
    float("the factor", factor).of(&[DType::F32])
}

/// Checks the buffers of a step, which must all have the same length.
pub(super) fn buffers<'a>(
    name: &str,
    buffers: impl IntoIterator<Item = (&'static str, &'a Tensor<1>)>,
    rounded: Option<&'a Tensor<1>>,
    grad: &Tensor<1>,
    factor: Option<&Tensor<1>>,
) {
    let rounded = rounded.map(|rounded| ("rounded", rounded));
    let buffers: Vec<_> = buffers.into_iter().chain(rounded).collect();
    let operands = buffers.iter().map(|(what, x)| kept(what, x));
    let factor = factor.map(|factor| one(name, factor));
    arg_check::check(
        name,
        [kept("the gradient", grad)]
            .into_iter()
            .chain(operands)
            .chain(factor),
    );
    let [len] = grad.dims();
    for (what, x) in buffers {
        let [found] = x.dims();
        assert_eq!(
            found, len,
            "{name}: {what} has {found} elements, but the gradient has {len}"
        );
    }
}
