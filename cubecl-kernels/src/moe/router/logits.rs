//! The router's GEMM, in which only sums are rounded.
//!
//! Products of bf16 numbers are exact in f32, so bf16 tokens and weights need no f32 copies: a
//! GPU's tensor cores sum the same terms as an f32 GEMM, but round sums a little more (on an H100
//! by 3e-6 of the largest over 2048 columns). Gradients of logits are f32. The backward pass splits
//! each into three bf16 numbers, side by side in one matrix, whose sum is exact unless it is below
//! 1e-35.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::backend_ops::as_row;
use megaburn_autograd::{CheckpointOperands, RecomputeFn};

use super::op::off_graph;
use crate::gemm_ops::{GemmAlgorithm, ProductOptions, multiply_with};
use crate::linear::{LinearOptions, linear};

/// Computes `x w` in f32, whatever the dtype of `x`. The gradient of `weight` is f32; the gradient
/// of `x` is rounded once, to its dtype.
///
/// `narrow` is `weight` in bf16, off the autodiff device; give it if bf16 represents `weight`
/// exactly. With `x` in bf16 the GEMM then uses `narrow`, and `x` is not copied to f32.
///
/// # Shapes
/// `x`: `[t, d]`; `weight`: `[d, e]` in f32; `narrow`: `[d, e]` in bf16; result: `[t, e]`
///
/// # Panics
/// If shapes or dtypes differ from these.
///
/// Source: Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `router_gating_linear`.
pub fn router_logits(x: Tensor<2>, weight: Tensor<2>, narrow: Option<Tensor<2>>) -> Tensor<2> {
    arg_check::check("router_logits", [float("x", &x), float("weight", &weight)]);
    let [t, d] = x.dims();
    let [inputs, e] = weight.dims();
    assert!(
        d == inputs && weight.dtype() == DType::F32,
        "router_logits: x [{t}, {d}] and a weight [{inputs}, {e}] in {}: the weight must be f32 \
        [{d}, {e}]",
        weight.dtype().name()
    );
    let narrow = narrow.filter(|_| x.dtype() == DType::BF16 && t > 0);
    let Some(narrow) = narrow else {
        return wide(x, weight);
    };
    assert!(
        narrow.dims() == [d, e] && narrow.dtype() == DType::BF16,
        "router_logits: the narrow weight is {:?} in {}, but must be [{d}, {e}] in bf16",
        narrow.dims(),
        narrow.dtype().name()
    );
    let device = x.device();
    if !device.is_autodiff() {
        return product(x, narrow, DType::F32);
    }
    let source = x.clone().inner();
    let y = product(source.clone(), narrow.clone(), DType::F32);
    let mut operands = CheckpointOperands::new(&device);
    operands.add(x);
    operands.add(weight);
    let [y] = operands.results([Tensor::from_inner(y)], move |[dy]| {
        let dy = parts(dy.expect("the result has a gradient"));
        let thrice = Tensor::cat(vec![narrow; 3], 1).transpose();
        let dx = product(dy.clone(), thrice, DType::BF16);
        let dw = product(source.transpose(), dy, DType::F32);
        let [first, second, third] = [0, 1, 2].map(|part| dw.clone().narrow(1, part * e, e));
        vec![Some(as_row(dx)), Some(as_row(first + second + third))]
    });
    y
}

fn wide(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    // Do not save the f32 copy of narrower rows for backward; recompute it.
    let source = (x.dtype() != DType::F32).then(|| off_graph(&x));
    let again = source.map(|rows| RecomputeFn::new(move || rows.clone().cast(DType::F32)));
    let options = LinearOptions {
        again,
        algorithm: GemmAlgorithm::Deterministic,
        ..Default::default()
    };
    linear(x.cast(DType::F32), weight, None, options)
}

/// Splits each number into three bf16 numbers that sum to it, in three matrices side by side.
fn parts(x: Tensor<2>) -> Tensor<2> {
    let wide = |x: &Tensor<2>| x.clone().cast(DType::F32);
    let first = x.clone().cast(DType::BF16);
    let rest = x - wide(&first);
    let second = rest.clone().cast(DType::BF16);
    let third = (rest - wide(&second)).cast(DType::BF16);
    Tensor::cat(vec![first, second, third], 1)
}

/// A deterministic GEMM: every rank that has the same tokens gets the same bits.
fn product(a: Tensor<2>, b: Tensor<2>, dtype: DType) -> Tensor<2> {
    let options = ProductOptions::new(dtype).with_algorithm(GemmAlgorithm::Deterministic);
    multiply_with(a, b, options)
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{
        assert_close, assert_refused, constant, leaf, normal, values,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    fn narrow_tokens_have_the_logits_and_gradients_of_wide_ones(
        #[values([5, 7, 3], [16, 64, 8], [1, 3, 1])] shape: [usize; 3],
    ) {
        let [t, d, e] = shape;
        let narrow = |shape| normal(shape).cast(DType::BF16);
        let x = leaf(narrow([t, d]));
        let w = narrow([d, e]).inner();
        let of = |w: &Tensor<2>| leaf(Tensor::from_inner(w.clone().cast(DType::F32)));
        let [found_w, expected_w] = [of(&w), of(&w)];
        let found = router_logits(x.clone(), found_w.clone(), Some(w));
        let expected = x.clone().cast(DType::F32).matmul(expected_w.clone());
        assert_eq!(found.dtype(), DType::F32);
        assert_close(found.clone(), expected.clone(), 1e-6);
        let dy = normal([t, e]);
        let found = (found * dy.clone()).sum().backward();
        let expected = (expected * dy).sum().backward();
        assert_close(
            found_w.grad(&found).unwrap(),
            expected_w.grad(&expected).unwrap(),
            1e-6,
        );
        let [found, expected] = [found, expected].map(|grads| x.grad(&grads).unwrap());
        assert_eq!(found.dtype(), DType::BF16);
        assert_close(found, expected, 1e-2);
    }

    #[test]
    fn numbers_are_the_sums_of_their_parts() {
        let x = Tensor::cat(
            vec![normal([9, 4]).inner(), normal([9, 4]).inner() * 1e-9],
            0,
        );
        let three = parts(x.clone()).cast(DType::F64);
        let sum = (0..3)
            .map(|part| three.clone().narrow(1, 4 * part, 4))
            .reduce(|a, b| a + b);
        assert_eq!(values(sum.unwrap()), values(x));
    }

    #[rstest]
    fn others_are_multiplied_in_f32(
        #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
        #[values(0, 4)] t: usize,
    ) {
        let x = leaf(normal([t, 5]).cast(dtype));
        let w = leaf(normal([5, 3]));
        let y = router_logits(x.clone(), w.clone(), None);
        assert_eq!((y.dims(), y.dtype()), ([t, 3], DType::F32));
        assert_close(
            y.clone(),
            x.clone().cast(DType::F32).matmul(w.clone()),
            1e-6,
        );
        let grads = y.sum().backward();
        assert_eq!(w.grad(&grads).unwrap().dims(), [5, 3]);
        assert_eq!(x.grad(&grads).unwrap().dtype(), dtype);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let narrow = |shape: [usize; 2]| constant(shape).cast(DType::BF16);
        let with = |narrow_w| router_logits(narrow([2, 3]), constant([3, 4]), Some(narrow_w));
        assert_refused(
            || router_logits(constant([2, 3]), constant([4, 3]), None),
            "[2, 3] and a weight [4, 3]",
        );
        assert_refused(
            || router_logits(constant([2, 3]), narrow([3, 4]), None),
            "in bf16: the weight must be f32",
        );
        assert_refused(
            || with(narrow([3, 2])),
            "the narrow weight is [3, 2] in bf16, but must be [3, 4]",
        );
        assert_refused(
            || with(constant([3, 4])),
            "in f32, but must be [3, 4] in bf16",
        );
    }
}
