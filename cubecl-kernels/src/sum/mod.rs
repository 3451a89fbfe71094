//! Sums of all elements (e.g. of token losses) and of columns (e.g. of per-sequence counts).

mod fallback;
#[cfg(feature = "cuda")]
mod launch;
mod op;
pub(crate) mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

use op::Sum;

/// Sums all elements in f32 (f64 for f64), in a fixed order. The result has the dtype of `x`.
///
/// On a GPU the kernel stores the sum instead of adding atomically to a zeroed buffer. So if an
/// input could not be computed (out of memory, say), the next read is an error and not a wrong
/// number.
///
/// # Shapes
/// `[..]` to `[1]`
pub fn sum_all<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    arg_check::check("sum_all", [float("x", &x)]);
    fused(Sum::All, [x.into_dispatch()])
}

/// Sums each column in f32 (f64 for f64), in a fixed order. The result has the dtype of `x`.
///
/// # Shapes
/// `[rows, n]` to `[1, n]`
pub fn sum_columns(x: Tensor<2>) -> Tensor<2> {
    arg_check::check("sum_columns", [float("x", &x)]);
    fused(Sum::Columns, [x.into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_function, leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;
    use crate::reference;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([8, 2, 16], [5, 3, 7], [1, 1, 1], [3, 0, 2])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 1e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf(normal(shape).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            sum_all(x.clone()),
            reference::sum_all(x.clone())
        );
        let view = || x.clone().swap_dims(0, 2) * 2.0;
        assert_same_function!(tolerance, [x], sum_all(view()), reference::sum_all(view()));
    }

    #[rstest]
    fn sums_of_columns_are_those_of_the_reference(
        #[values([8, 16], [5, 7], [1, 3], [3, 1], [0, 4])] shape: [usize; 2],
        #[values((DType::F32, 2e-6), (DType::BF16, 1e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf(normal(shape).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            sum_columns(x.clone()),
            reference::sum_columns(x.clone())
        );
        let view = || x.clone().swap_dims(0, 1) * 2.0;
        assert_same_function!(
            tolerance,
            [x],
            sum_columns(view()),
            reference::sum_columns(view())
        );
    }

    #[test]
    fn half_precision_is_summed_in_f32() {
        // 256 + 1 rounds to 256 in bf16.
        let ones = Tensor::<1>::ones([300], &leaf(normal([1])).device()).cast(DType::BF16);
        assert_eq!(values(sum_all(ones)), [300.0]);
        assert_refused(|| sum_all(quantized([2, 4])), "sum_all: x is qfloat");
        assert_refused(
            || sum_columns(quantized([2, 4])),
            "sum_columns: x is qfloat",
        );
    }
}
