//! Repeats a head that all heads of a token share; the backward pass sums their gradients.

mod op;
pub(crate) mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

use op::RepeatHeads;

/// Expands one head to a view of `heads` equal ones. The gradient is the sum over the heads, in f32
/// (f64 for f64); on a GPU, a kernel reads their gradients once, in place.
///
/// Source: DeepSeek-V2, <https://arxiv.org/abs/2405.04434>, section 2.1.3, whose heads share a
/// rotated key.
///
/// # Shapes
/// `x`: `[s, b, 1, d]`, result: `[s, b, heads, d]`
///
/// # Panics
/// If `x` has several heads, or `heads` is 0.
pub fn repeat_heads(x: Tensor<4>, heads: usize) -> Tensor<4> {
    arg_check::check("repeat_heads", [float("x", &x)]);
    let [_, _, one, _] = x.dims();
    assert!(
        one == 1 && heads > 0,
        "repeat_heads: cannot repeat {one} heads to {heads}: x must have one head, and the result at least one"
    );
    fused(RepeatHeads { heads }, [x.into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_function, leaf, normal, quantized,
    };
    use rstest::rstest;

    use super::*;
    use crate::reference;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values(([8, 2, 1, 16], 4), ([5, 3, 1, 7], 3), ([1, 1, 1, 1], 1))] (shape, heads): (
            [usize; 4],
            usize,
        ),
        #[values((DType::F32, 2e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf(normal(shape).cast(dtype));
        assert_same_function!(
            tolerance,
            [x],
            repeat_heads(x.clone(), heads),
            reference::repeat_heads(x.clone(), heads)
        );
    }

    #[test]
    fn no_tokens_give_none_and_a_gradient_of_none() {
        let x = leaf(normal([0, 2, 1, 4]));
        let y = repeat_heads(x.clone(), 3);
        assert_eq!(y.dims(), [0, 2, 3, 4]);
        assert_eq!(x.grad(&y.sum().backward()).unwrap().dims(), [0, 2, 1, 4]);
    }

    #[rstest]
    #[case(|| drop(repeat_heads(normal([2, 3, 2, 4]), 4)), "repeat_heads: cannot repeat 2 heads to 4")]
    #[case(|| drop(repeat_heads(normal([2, 3, 1, 4]), 0)), "repeat_heads: cannot repeat 1 heads to 0")]
    #[case(|| drop(repeat_heads(quantized([2, 1, 1, 4]), 2)), "repeat_heads: x is qfloat")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
