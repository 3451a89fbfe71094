//! Fallback for activations, composed of a backend's primitives.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};
use megaburn_autograd::backend_ops::{
    bool_dtype, cast, compute_dtype, halves, last_dim, row, rows,
};
use megaburn_autograd::on_composed_backends;

use super::op::{
    ALPHA, Activate, Activation, ActivationGrads, ActivationInput, CLAMP, PointwiseFn,
};

on_composed_backends! {
    impl Activate {
        fn forward(
            activation: Activation,
            input: ActivationInput<FloatTensor<Self>>,
        ) -> FloatTensor<Self> {
            forward::<Self>(activation, input)
        }

        fn backward(
            activation: Activation,
            input: ActivationInput<FloatTensor<Self>>,
            dy: FloatTensor<Self>,
        ) -> ActivationGrads<FloatTensor<Self>> {
            backward::<Self>(activation, input, dy)
        }
    }
}

pub(super) fn forward<B: Backend>(
    activation: Activation,
    input: ActivationInput<FloatTensor<B>>,
) -> FloatTensor<B> {
    let mut shape = input.x.shape();
    let dtype = input.x.dtype();
    let wide = compute_dtype(dtype);
    let (x, up) = split::<B>(activation, input.x, input.bias, wide);
    let mut y = value::<B>(activation.curve, x);
    if let Some(up) = up {
        y = B::float_mul(y, factor::<B>(activation.curve, up));
        let last = shape.num_dims() - 1;
        shape[last] /= 2;
    }
    if let Some(weight) = input.weight {
        y = B::float_mul(y, column::<B>(weight, wide));
    }
    B::float_reshape(cast::<B>(y, dtype.into()), shape)
}

pub(super) fn backward<B: Backend>(
    activation: Activation,
    input: ActivationInput<FloatTensor<B>>,
    dy: FloatTensor<B>,
) -> ActivationGrads<FloatTensor<B>> {
    let ActivationInput { x, bias, weight } = input;
    let shape = x.shape();
    let dtype = x.dtype();
    let wide = compute_dtype(dtype);
    let for_weight = weight.as_ref().map(|weight| weight.dtype());
    let has_bias = bias.is_some();
    let (x, up) = split::<B>(activation, x, bias, wide);
    let mut dy = cast::<B>(rows::<B>(dy), wide);
    let value = value::<B>(activation.curve, x.clone());
    let mut dweight = None;
    if let (Some(weight), Some(dtype)) = (weight, for_weight) {
        let y = match &up {
            Some(up) => B::float_mul(value.clone(), factor::<B>(activation.curve, up.clone())),
            None => value.clone(),
        };
        let products = B::float_sum_dim(B::float_mul(y, dy.clone()), 1);
        let tokens = products.shape().num_elements();
        let products = B::float_reshape(products, Shape::from([tokens]));
        dweight = Some(cast::<B>(products, dtype.into()));
        dy = B::float_mul(dy, column::<B>(weight, wide));
    }
    let slope = slope::<B>(activation.curve, x);
    let dx = match up {
        Some(up) => {
            let dup = B::float_mul(value, dy.clone());
            let dup = match activation.curve {
                PointwiseFn::ClampedSilu => {
                    let size = B::float_abs(up.clone());
                    B::float_mul(dup, at_most::<B>(size))
                }
                _ => dup,
            };
            let factor = factor::<B>(activation.curve, up);
            let dgate = B::float_mul(B::float_mul(slope, factor), dy);
            B::float_cat(vec![dgate, dup], 1)
        }
        None => B::float_mul(slope, dy),
    };
    ActivationGrads {
        bias: has_bias.then(|| dx.clone()),
        x: B::float_reshape(cast::<B>(dx, dtype.into()), shape),
        weight: dweight,
    }
}

/// Returns the input of the curve and, for a gated activation, its factor, as rows in the compute
/// dtype.
fn split<B: Backend>(
    activation: Activation,
    x: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    wide: FloatDType,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let mut x = cast::<B>(rows::<B>(x), wide);
    if let Some(bias) = bias {
        x = B::float_add(x, row::<B>(bias, wide));
    }
    if activation.gated && last_dim(&x.shape()) > 0 {
        let (gate, up) = halves::<B>(x);
        return (gate, Some(up));
    }
    (x, None)
}

/// Reshapes a vector of one number per row to a column that broadcasts over rows.
fn column<B: Backend>(vector: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let n = vector.shape().num_elements();
    B::float_reshape(cast::<B>(vector, dtype), Shape::from([n, 1]))
}

fn value<B: Backend>(curve: PointwiseFn, x: FloatTensor<B>) -> FloatTensor<B> {
    match curve {
        PointwiseFn::SquaredRelu => {
            let x = B::relu(x);
            B::float_mul(x.clone(), x)
        }
        PointwiseFn::ClampedSilu => {
            let x = B::float_clamp_max(x, CLAMP.into());
            B::float_mul(x.clone(), share::<B>(curve, x))
        }
        curve => B::float_mul(x.clone(), share::<B>(curve, x)),
    }
}

/// What a gated activation multiplies the curve by, from the second half `up` of a row.
fn factor<B: Backend>(curve: PointwiseFn, up: FloatTensor<B>) -> FloatTensor<B> {
    match curve {
        PointwiseFn::ClampedSilu => {
            let up = B::float_clamp(up, (-CLAMP).into(), CLAMP.into());
            B::float_add_scalar(up, 1.0.into())
        }
        _ => up,
    }
}

/// 1 where `x` is at most [`CLAMP`], otherwise 0.
fn at_most<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let device = x.device();
    let dtype = x.dtype();
    let ones = B::float_ones(x.shape(), &device, dtype.into());
    let beyond = B::float_greater_elem(x, CLAMP.into(), bool_dtype::<B>(&device));
    B::float_mask_fill(ones, beyond, 0.0.into())
}

/// The fraction of `x`, between 0 and 1, that a curve passes: `curve(x) / x`.
fn share<B: Backend>(curve: PointwiseFn, x: FloatTensor<B>) -> FloatTensor<B> {
    match curve {
        PointwiseFn::Silu => B::sigmoid(x),
        PointwiseFn::ClampedSilu => B::sigmoid(B::float_mul_scalar(x, ALPHA.into())),
        PointwiseFn::Gelu => {
            let erf = B::float_erf(B::float_mul_scalar(x, FRAC_1_SQRT_2.into()));
            B::float_mul_scalar(B::float_add_scalar(erf, 1.0.into()), 0.5.into())
        }
        // `(1 + tanh(u)) / 2` is the sigmoid of `2u`.
        PointwiseFn::GeluTanh => B::sigmoid(cubic::<B>(x, [2.0 * (2.0 / PI).sqrt(), 0.044715])),
        PointwiseFn::SquaredRelu => unreachable!(
            "squared ReLU is not computed as x times a \
            factor"
        ),
    }
}

/// `scale * (x + third * x^3)`.
fn cubic<B: Backend>(x: FloatTensor<B>, [scale, third]: [f64; 2]) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x.clone());
    let inner = B::float_add_scalar(B::float_mul_scalar(square, third.into()), 1.0.into());
    B::float_mul(B::float_mul_scalar(x, scale.into()), inner)
}

/// The derivative of the curve.
fn slope<B: Backend>(curve: PointwiseFn, x: FloatTensor<B>) -> FloatTensor<B> {
    if curve == PointwiseFn::SquaredRelu {
        return B::float_mul_scalar(B::relu(x), 2.0.into());
    }
    let (x, inside) = match curve {
        PointwiseFn::ClampedSilu => (
            B::float_clamp_max(x.clone(), CLAMP.into()),
            Some(at_most::<B>(x)),
        ),
        _ => (x, None),
    };
    let s = share::<B>(curve, x.clone());
    // `x` times the derivative of the passed fraction.
    let change = match curve {
        PointwiseFn::Gelu => {
            let square = B::float_mul(x.clone(), x.clone());
            let density = B::float_exp(B::float_mul_scalar(square, (-0.5).into()));
            B::float_mul(
                x,
                B::float_mul_scalar(density, (1.0 / (2.0 * PI).sqrt()).into()),
            )
        }
        curve => {
            // The derivative of a sigmoid of `z`, times `x * dz/dx`.
            let curved = B::float_sub(s.clone(), B::float_mul(s.clone(), s.clone()));
            let inner = match curve {
                PointwiseFn::GeluTanh => cubic::<B>(x, [2.0 * (2.0 / PI).sqrt(), 3.0 * 0.044715]),
                PointwiseFn::ClampedSilu => B::float_mul_scalar(x, ALPHA.into()),
                _ => x,
            };
            B::float_mul(inner, curved)
        }
    };
    let slope = B::float_add(s, change);
    match inside {
        Some(inside) => B::float_mul(slope, inside),
        None => slope,
    }
}
