//! The common implementation of all MLP activations: one operation with options, composed of
//! primitives on CPUs and fused kernels on GPUs. The backward pass recomputes everything from the
//! inputs.

pub(crate) mod clamped_swiglu;
mod fallback;
pub(crate) mod geglu;
pub(crate) mod gelu;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
pub(crate) mod reference;
pub(crate) mod squared_relu;
pub(crate) mod swiglu;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

use crate::bias::Bias;
use op::{Activation, Biased, PointwiseFn};

/// `curve(x)`.
pub(crate) fn plain<const D: usize>(name: &str, curve: PointwiseFn, x: Tensor<D>) -> Tensor<D> {
    arg_check::check(name, [float("x", &x)]);
    let activation = Activation {
        curve,
        gated: false,
    };
    fused(activation, [x.into_dispatch()])
}

/// `curve(x + bias)`.
pub(crate) fn biased<const D: usize>(
    name: &str,
    curve: PointwiseFn,
    x: Tensor<D>,
    bias: Bias,
) -> Tensor<D> {
    arg_check::check(name, [float("x", &x), float("the bias", &bias.value)]);
    bias.check(name, x.dims()[D - 1]);
    let activation = Activation {
        curve,
        gated: false,
    };
    let x = x.into_dispatch();
    let value = bias.value.into_dispatch();
    let how = Biased {
        activation,
        main_grad: bias.main_grad,
    };
    fused(how, [x, value])
}

/// `curve(gate) * up`, multiplied by a weight per row if weights are given.
pub(crate) fn gated<const D: usize>(
    name: &str,
    curve: PointwiseFn,
    gate_up: Tensor<D>,
    weight: Option<Tensor<1>>,
) -> Tensor<D> {
    check_gated(name, &gate_up);
    let activation = Activation { curve, gated: true };
    match weight {
        Some(weight) => weighted(name, activation, gate_up, weight),
        None => fused(activation, [gate_up.into_dispatch()]),
    }
}

/// Panics unless `gate_up` is a float tensor with halves.
fn check_gated<const D: usize>(name: &str, gate_up: &Tensor<D>) {
    arg_check::check(name, [float("gate_up", gate_up)]);
    let n = gate_up.dims()[D - 1];
    assert!(
        n.is_multiple_of(2),
        "{name}: the last dimension, {n}, must be even (gate and up halves)"
    );
}

/// The activation of each row, multiplied by the row's weight.
pub(crate) fn weighted<const D: usize>(
    name: &str,
    activation: Activation,
    x: Tensor<D>,
    weight: Tensor<1>,
) -> Tensor<D> {
    arg_check::check(name, [float("x", &x), float("the weight", &weight)]);
    let (dims, [length]) = (x.dims(), weight.dims());
    let rows = dims[..D - 1].iter().product::<usize>();
    assert_eq!(
        rows, length,
        "{name}: {length} weights do not match {rows} rows"
    );
    assert!(dims[D - 1] > 0, "{name}: x is {dims:?}, its rows are empty");
    let x = x.into_dispatch();
    let weight = weight.into_dispatch();
    fused(activation, [x, weight])
}
