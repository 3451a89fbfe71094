//! Norms.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{layer_norm, rms_norm};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[("norms", norms)];

fn norms() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[16, 2, 256], [5, 3, 67]] {
            let what = format!("norm {s}x{b}x{n}");
            compare!(what, dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                rms_norm::<3>(x, gamma, 1e-5)
            });
            compare!(what, dtype, tolerance, [x: [s, b, n], gamma: [n], beta: [n]], |_,
                x,
                gamma,
                beta| {
                layer_norm::<3>(x, gamma, Some(beta), 1e-5)
            });
        }
    }
    Ok(())
}
