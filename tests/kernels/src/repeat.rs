//! Tests of repeating one head.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::repeat_heads;

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("one_head_for_all", heads),
    ("one_head_beside_others", beside),
];

/// Few heads, and more than a cube has rows; ragged ones are read element by element.
const CASES: [([usize; 4], usize); 5] = [
    ([64, 2, 1, 64], 16),
    ([7, 3, 1, 37], 5),
    ([1, 1, 1, 5], 1),
    ([33, 1, 1, 64], 128),
    ([3, 2, 1, 10], 2100),
];

fn heads() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for (shape, heads) in CASES {
            let what = format!("repeat_heads {shape:?} to {heads}");
            compare!(what, dtype, tolerance, [x: shape], |_, x| repeat_heads(x, heads));
        }
    }
    Ok(())
}

/// As in multi-head latent attention: the gradient is a slice of longer rows.
fn beside() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for ([s, b, _, d], heads) in CASES {
            let what = format!("repeat_heads beside {s}x{b}x{heads}x{d}");
            let one = [s, b, 1, d];
            let all = [s, b, heads, 2 * d];
            compare!(what, dtype, tolerance, [x: one, y: all], |_, x, y| {
                Tensor::cat(vec![y, repeat_heads(x, heads)], 3)
            });
        }
    }
    Ok(())
}
