//! Rotations and activations.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{RopeConfig, apply_rope, gelu, swiglu};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[("rope_and_activations", pointwise)];

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
