//! Tests of sums of all elements and of columns. Inputs are not negative; otherwise some sums would
//! be only rounding error.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{sum_all, sum_columns};

use super::compare::*;

pub(super) const TESTS: &[super::Test] =
    &[("sums_of_all_elements", all), ("sums_of_columns", columns)];

fn all() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for shape in [[64, 128], [5, 7], [1, 1], [4111, 3]] {
            let what = format!("sum_all {shape:?}");
            compare!(what, dtype, tolerance, [x: shape], |_, x: Tensor<2>| {
                sum_all(x.abs())
            });
            compare!(format!("{what} swapped"), dtype, tolerance, [x: shape], |_, x: Tensor<2>| {
                sum_all(x.abs().swap_dims(0, 1))
            });
        }
    }
    Ok(())
}

fn columns() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for shape in [[64, 128], [5, 7], [1, 3], [3, 1], [4111, 24]] {
            let what = format!("sum_columns {shape:?}");
            compare!(what, dtype, tolerance, [x: shape], |_, x: Tensor<2>| {
                sum_columns(x.abs())
            });
            compare!(format!("{what} swapped"), dtype, tolerance, [x: shape], |_, x: Tensor<2>| {
                sum_columns(x.abs().swap_dims(0, 1))
            });
        }
    }
    Ok(())
}
