//! Activation kernels. Without weights or biases each unit computes one vector. The weight gradient
//! uses one group of units per row, the bias gradient one unit per column of vectors.

use std::f32::consts::FRAC_1_SQRT_2;

use cubecl::prelude::*;

use super::op::{self, Activation, PointwiseFn};
use crate::kernel_parts::{PLANE, RowGroup, magnitude, raise, row_sum, unit_and_row};

/// Units per cube of the elementwise kernels.
pub(super) const UNITS: u32 = 256;
const PLANES: u32 = UNITS / PLANE;
/// The standard normal density at 0.
const DENSITY: f32 = 0.398_942_3;
/// [`op::CLAMP`] in the type of the kernels.
const CLAMP: f32 = op::CLAMP as f32;
/// The smallest factor before 1 is added.
const LEAST: f32 = -CLAMP;
/// [`op::ALPHA`] in the type of the kernels.
const ALPHA: f32 = op::ALPHA as f32;
/// `2 * sqrt(2 / pi)`.
const TANH_SCALE: f32 = 1.595_769_2;

/// Returns the curve's value and its derivative.
#[cube]
fn curve<N: Size>(
    x: Vector<f32, N>,
    #[comptime] curve: PointwiseFn,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let one = Vector::<f32, N>::new(1.0);
    let square = x * x;
    if comptime!(curve == PointwiseFn::ClampedSilu) {
        let limited = min(x, Vector::new(CLAMP));
        let scaled = limited * Vector::new(ALPHA);
        let share = one / (one + (-scaled).exp());
        let slope = share + scaled * (share - share * share);
        (limited * share, slope * unchanged(x, limited))
    } else if comptime!(curve == PointwiseFn::SquaredRelu) {
        let positive = max(x, Vector::new(0.0));
        (positive * positive, positive + positive)
    } else if comptime!(curve == PointwiseFn::Gelu) {
        let share = (x * Vector::new(FRAC_1_SQRT_2)).erf() * Vector::new(0.5) + Vector::new(0.5);
        let density = (square * Vector::new(-0.5)).exp() * Vector::new(DENSITY);
        (x * share, share + x * density)
    } else {
        // `(1 + tanh(u)) / 2` is the sigmoid of `2u`, so SiLU and tanh-GELU are both sigmoids of
        // some `z`.
        let mut z = x;
        let mut change = x;
        if comptime!(curve == PointwiseFn::GeluTanh) {
            let scaled = x * Vector::new(TANH_SCALE);
            z = scaled * (one + square * Vector::new(0.044715));
            change = scaled * (one + square * Vector::new(0.134145));
        }
        // `inverse_sqrt` is one GPU instruction, a division about ten and a branch. With it the
        // kernel stays memory-bound.
        let root = (one + (-z).exp()).inverse_sqrt();
        let share = root * root;
        (x * share, share + change * (share - share * share))
    }
}

/// Returns 1 where `limited` equals `x`, and 0 where a limit has changed it.
#[cube]
fn unchanged<N: Size>(x: Vector<f32, N>, limited: Vector<f32, N>) -> Vector<f32, N> {
    let change = max(x - limited, limited - x);
    let one = Vector::<f32, N>::new(1.0);
    one - min(change * Vector::new(1e30), one)
}

/// Returns what a gated activation multiplies the curve by, and the derivative of that by `up`.
#[cube]
fn up_factor<N: Size>(
    up: Vector<f32, N>,
    #[comptime] curve: PointwiseFn,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let one = Vector::<f32, N>::new(1.0);
    if comptime!(curve == PointwiseFn::ClampedSilu) {
        let limited = max(min(up, Vector::new(CLAMP)), Vector::new(LEAST));
        (limited + one, unchanged(up, limited))
    } else {
        (up, one)
    }
}

/// Computes the activation and, if it is `observed`, the largest magnitude of the result, to which
/// it raises `amax`; otherwise `amax` may be any buffer. A result row has `width` vectors; the up
/// half starts `width` vectors after the gate half.
#[cube(launch, address_type = "dynamic")]
pub(super) fn forward_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<G, N>],
    weight: &[G],
    y: &mut [Vector<F, N>],
    amax: &mut [Atomic<u32>],
    vectors: usize,
    width: u32,
    stride: u32,
    #[comptime] activation: Activation,
    #[comptime] observed: bool,
    #[comptime] biased: bool,
    #[comptime] weighted: bool,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let mut largest = u32::new(0);
    if ABSOLUTE_POS < vectors {
        let row = ABSOLUTE_POS / width as usize;
        let column = ABSOLUTE_POS % width as usize;
        let at = row * stride as usize + column;
        let mut input = Vector::<f32, N>::cast_from(x[at]);
        if comptime!(biased) {
            input += Vector::cast_from(bias[column]);
        }
        let (mut value, _slope) = curve(input, activation.curve);
        if comptime!(activation.gated) {
            let up = Vector::<f32, N>::cast_from(x[at + width as usize]);
            let (by, _slope) = up_factor(up, activation.curve);
            value *= by;
        }
        if comptime!(weighted) {
            value *= Vector::new(f32::cast_from(weight[row]));
        }
        let stored = Vector::<F, N>::cast_from(value);
        y[ABSOLUTE_POS] = stored;
        if comptime!(observed) {
            largest = magnitude(stored);
        }
    }
    if comptime!(observed) {
        raise(amax, 0usize, largest, PLANES);
    }
}

/// Computes the gradient of `x`. `amax` is as in [`forward_kernel`].
#[cube(launch, address_type = "dynamic")]
pub(super) fn backward_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    amax: &mut [Atomic<u32>],
    vectors: usize,
    width: u32,
    x_stride: u32,
    dy_stride: u32,
    #[comptime] activation: Activation,
    #[comptime] observed: bool,
    #[define(F)] _dtype: ElemType,
) {
    let mut largest = u32::new(0);
    if ABSOLUTE_POS < vectors {
        let width = width as usize;
        let row = ABSOLUTE_POS / width;
        let column = ABSOLUTE_POS % width;
        let at = row * x_stride as usize + column;
        let dy = Vector::<f32, N>::cast_from(dy[row * dy_stride as usize + column]);
        let (value, slope) = curve(Vector::<f32, N>::cast_from(x[at]), activation.curve);
        if comptime!(activation.gated) {
            let up = Vector::<f32, N>::cast_from(x[at + width]);
            let (by, change) = up_factor(up, activation.curve);
            let to = row * 2 * width + column;
            let of_gate = Vector::<F, N>::cast_from(dy * slope * by);
            let of_up = Vector::<F, N>::cast_from(dy * value * change);
            dx[to] = of_gate;
            dx[to + width] = of_up;
            if comptime!(observed) {
                largest = max(magnitude(of_gate), magnitude(of_up));
            }
        } else {
            let stored = Vector::<F, N>::cast_from(dy * slope);
            dx[ABSOLUTE_POS] = stored;
            if comptime!(observed) {
                largest = magnitude(stored);
            }
        }
    }
    if comptime!(observed) {
        raise(amax, 0usize, largest, PLANES);
    }
}

/// Like [`backward_kernel`], but also reduces the weight gradient: the sum over each row of `dy`
/// times the unweighted activation.
#[cube(launch, address_type = "dynamic")]
pub(super) fn weighted_backward_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    weight: &[G],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    dweight: &mut [G],
    rows: u32,
    width: u32,
    x_stride: u32,
    dy_stride: u32,
    #[comptime] activation: Activation,
    #[comptime] group: RowGroup,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let mut shared = Shared::new_slice(32usize);
    let (unit, row) = unit_and_row(group);
    if row < rows {
        let factor = Vector::<f32, N>::new(f32::cast_from(weight[row as usize]));
        let from = row as usize * x_stride as usize;
        let from_dy = row as usize * dy_stride as usize;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut column = unit;
        while column < width {
            let at = from + column as usize;
            let dy = Vector::<f32, N>::cast_from(dy[from_dy + column as usize]);
            let (value, slope) = curve(Vector::<f32, N>::cast_from(x[at]), activation.curve);
            let weighted = dy * factor;
            if comptime!(activation.gated) {
                let up = Vector::<f32, N>::cast_from(x[at + width as usize]);
                let (by, change) = up_factor(up, activation.curve);
                let to = row as usize * 2 * width as usize + column as usize;
                dx[to] = Vector::cast_from(weighted * slope * by);
                dx[to + width as usize] = Vector::cast_from(weighted * value * change);
                sum += dy * value * by;
            } else {
                let to = row as usize * width as usize + column as usize;
                dx[to] = Vector::cast_from(weighted * slope);
                sum += dy * value;
            }
            column += comptime!(group.planes * 32);
        }
        let sum = row_sum(Vector::vector_sum(sum), &mut shared, 0u32, group.planes);
        if unit == 0 {
            dweight[row as usize] = G::cast_from(sum);
        }
    }
}

/// Like [`backward_kernel`], for an activation with a bias. Each unit processes one column of every
/// `parts`-th row and writes the sum as its partial bias gradient.
#[cube(launch, address_type = "dynamic")]
pub(super) fn biased_backward_kernel<F: Float, G: Float, N: Size>(
    x: &[Vector<F, N>],
    bias: &[Vector<G, N>],
    dy: &[Vector<F, N>],
    dx: &mut [Vector<F, N>],
    dbias: &mut [Vector<f32, N>],
    rows: u32,
    width: u32,
    x_stride: u32,
    dy_stride: u32,
    parts: u32,
    #[comptime] activation: Activation,
    #[comptime] ahead: u32,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS_X;
    if column < width {
        let bias = Vector::<f32, N>::cast_from(bias[column as usize]);
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut row = CUBE_POS_Y;
        while row < rows {
            // Issue the loads of several rows together to hide memory latency.
            let mut inputs = Array::<Vector<F, N>>::new(comptime!(ahead as usize));
            let mut outputs = Array::<Vector<F, N>>::new(comptime!(ahead as usize));
            #[unroll]
            for i in 0..ahead {
                let row = row + i * parts;
                if row < rows {
                    let row = row as usize;
                    let column = column as usize;
                    inputs[i as usize] = x[row * x_stride as usize + column];
                    outputs[i as usize] = dy[row * dy_stride as usize + column];
                }
            }
            #[unroll]
            for i in 0..ahead {
                let row = row + i * parts;
                if row < rows {
                    let input = Vector::<f32, N>::cast_from(inputs[i as usize]) + bias;
                    let (_value, slope) = curve(input, activation.curve);
                    let value = Vector::<f32, N>::cast_from(outputs[i as usize]) * slope;
                    sum += value;
                    let to = row as usize * width as usize + column as usize;
                    dx[to] = Vector::cast_from(value);
                }
            }
            row += parts * ahead;
        }
        dbias[CUBE_POS_Y as usize * width as usize + column as usize] = sum;
    }
}
