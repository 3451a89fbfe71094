//! Tests of RoPE and activations.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::*;

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("rope_and_activations", pointwise),
    ("rotations_of_views", rotations),
    ("rotations_of_parts_and_packed_sequences", layouts),
    ("gated_activations", gated),
    ("activations_with_biases", biased),
    ("activations_of_views_and_large_numbers", views),
];

fn pointwise() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, h, d] in [[16, 2, 4, 64], [7, 1, 3, 10]] {
            let what = format!("{s}x{b}x{h}x{d}");
            compare!(format!("rope {what}"), dtype, tolerance, [x: [s, b, h, d]], |device: &Device,
                x| {
                let table = RopeConfig::new(d).init(3..3 + s, device);
                apply_rope(x, &table.expect("it can be"))
            });
            compare!(format!("swiglu {what}"), dtype, tolerance, [x: [s, b, 2 * d]], |_, x| {
                swiglu::<3>(x)
            });
            compare!(format!("gelu {what}"), dtype, tolerance, [x: [s, b, d]], |_, x| {
                gelu::<3>(x)
            });
        }
    }
    Ok(())
}

/// Heads sliced out of a fused QKV tensor, and swapped dimensions.
fn rotations() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, h, d] in [[5, 2, 3, 64], [3, 2, 2, 10], [4, 1, 2, 2]] {
            let what = format!("rope {s}x{b}x{h}x{d}");
            compare!(what, dtype, tolerance, [x: [s, b, 3 * h, d]], |device: &Device, x| {
                let x: Tensor<4> = x;
                let table = RopeConfig::new(d).init(3..3 + s, device).expect("it can be");
                let (q, k) = (x.clone().narrow(2, 0, h), x.narrow(2, h, h));
                Tensor::cat(vec![apply_rope(q, &table), apply_rope(k, &table)], 2)
            });
            compare!(what, dtype, tolerance, [x: [b, h, s, d]], |device: &Device, x| {
                let x: Tensor<4> = x;
                let table = RopeConfig::new(d).init(0..s, device).expect("it can be");
                apply_rope(x.swap_dims(1, 2).swap_dims(0, 1), &table)
            });
        }
    }
    Ok(())
}

/// Both layouts, fully and partially rotated heads, and positions per sequence.
fn layouts() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for ([s, b, h, d], part) in [
            ([5, 2, 3, 64], 0.5),
            ([4, 3, 2, 10], 0.4),
            ([3, 2, 2, 24], 1.0),
        ] {
            for layout in [RopeLayout::Halves, RopeLayout::Interleaved] {
                let config = RopeConfig::new(d)
                    .with_layout(layout)
                    .with_rotary_percent(part);
                let ends = (0..b).map(|b| packed_positions(&[0, b, s]).expect("they ascend"));
                let sequences: Vec<Vec<usize>> = ends.collect();
                let what = format!("rope {layout:?} {part} of {s}x{b}x{h}x{d}");
                compare!(what, dtype, tolerance, [x: [s, b, h, d]], |device: &Device, x| {
                    let table = config.init(2..2 + s, device).expect("it can be");
                    apply_rope(x, &table)
                });
                compare!(what, dtype, tolerance, [x: [s, b, 3 * h, d]], |device: &Device, x| {
                    let x: Tensor<4> = x;
                    let table = config.init_each(&sequences, device).expect("it can be");
                    let (q, k) = (x.clone().narrow(2, 0, h), x.narrow(2, h, h));
                    Tensor::cat(vec![apply_rope(q, &table), apply_rope(k, &table)], 2)
                });
            }
        }
    }
    Ok(())
}

/// Rows of several cubes, rows of some vectors, and ragged ones.
const SHAPES: [[usize; 3]; 4] = [[3, 2, 64], [5, 3, 10], [2, 1, 5000], [300, 2, 1]];

fn gated() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, f] in SHAPES {
            let what = format!("gated {s}x{b}x{f}");
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f]], |_, x| geglu::<3>(x));
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f]], |_, x| geglu_tanh::<3>(x));
            // Inputs of this size are often beyond the limits. The factor is a power of two, so that
            // no product is rounded to the other side of a limit.
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f]], |_, x| {
                let x: Tensor<3> = x;
                clamped_swiglu::<3>(x * 8.0)
            });
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f], p: [s * b]], |_, x, p| {
                let x: Tensor<3> = x;
                clamped_swiglu_weighted::<3>(x * 8.0, p)
            });
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f], p: [s * b]], |_, x, p| {
                swiglu_weighted::<3>(x, p)
            });
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f], p: [s * b]], |_, x, p| {
                geglu_weighted::<3>(x, p)
            });
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f], p: [s * b]], |_, x, p| {
                geglu_tanh_weighted::<3>(x, p)
            });
            compare!(what, dtype, tolerance, [x: [s, b, f], p: [s * b]], |_, x, p| {
                squared_relu_weighted::<3>(x, p)
            });
        }
    }
    Ok(())
}

fn biased() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, f] in SHAPES {
            let what = format!("plain {s}x{b}x{f}");
            compare!(what, dtype, tolerance, [x: [s, b, f]], |_, x| gelu_tanh::<3>(x));
            compare!(what, dtype, tolerance, [x: [s, b, f]], |_, x| squared_relu::<3>(x));
            compare!(what, dtype, tolerance, [x: [s, b, f], bias: [f]], |_, x, bias| {
                bias_gelu::<3>(x, bias)
            });
            compare!(what, dtype, tolerance, [x: [s, b, f], bias: [f]], |_, x, bias| {
                bias_gelu_tanh::<3>(x, bias)
            });
        }
    }
    Ok(())
}

/// Rows sliced out of longer ones, swapped dimensions, and numbers whose exponentials overflow.
fn views() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, f] in [[4, 3, 32], [3, 5, 7]] {
            let what = format!("view {s}x{b}x{f}");
            let large = if dtype == DType::F16 { 32.0 } else { 8192.0 };
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f + 8], p: [s * b]], |_, x, p| {
                let x: Tensor<3> = x;
                swiglu_weighted::<3>(x.narrow(2, 4, 2 * f), p)
            });
            compare!(what, dtype, tolerance, [x: [b, s, 2 * f]], |_, x| {
                let x: Tensor<3> = x;
                swiglu::<3>(x.swap_dims(0, 1))
            });
            compare!(what, dtype, tolerance, [x: [b, s, f], bias: [f]], |_, x, bias| {
                let x: Tensor<3> = x;
                bias_gelu_tanh::<3>(x.swap_dims(0, 1), bias)
            });
            compare!(what, dtype, tolerance, [x: [s, b, 2 * f]], |_, x| {
                let x: Tensor<3> = x;
                swiglu::<3>(x * large) * (1.0 / large)
            });
            compare!(what, dtype, tolerance, [x: [s, b, f]], |_, x| {
                let x: Tensor<3> = x;
                gelu_tanh::<3>(x * large)
            });
        }
    }
    Ok(())
}
