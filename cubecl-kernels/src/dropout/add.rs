use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

use super::key::DropoutKey;
use super::op::Mask;

/// `residual + dropout(x + bias)`, the end of a transformer's attention and MLP blocks, in one pass
/// over memory on a GPU (Megatron's `fused_bias_dropout.py`).
///
/// Computed in f32 (f64 for f64) and rounded once, to the dtype of `x`. [`dropout`] defines which
/// elements are dropped; with `p = 0`, as in evaluation, no random numbers are drawn. The backward
/// pass regenerates the mask, so the mask is not saved. The gradient of the residual is the
/// gradient of the result, unchanged.
///
/// # Shapes
/// - `x`, `residual`, result: `[.., n]`, the shard that `key` describes
/// - `bias`: `[n]`
///
/// # Determinism
/// The dropped elements are the same on every device, rank count and thread timing.
///
/// # Panics
/// If `p` is not in `[0, 1)`, the shard does not lie in the key's global shape, the residual
/// differs from `x` in shape or dtype, or the bias is not as long as their last dimension.
///
/// [`dropout`]: crate::dropout
pub fn bias_dropout_add<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    residual: Tensor<D>,
    p: f64,
    key: DropoutKey,
) -> Tensor<D> {
    let name = "bias_dropout_add";
    let [of_x, of_residual] = [&x, &residual].map(|t| (t.dims(), t.dtype()));
    assert_eq!(
        of_x, of_residual,
        "{name}: the shapes or dtypes of x and the residual differ"
    );
    let operands = [float("x", &x), float("the residual", &residual)];
    let bias_too = bias.as_ref().map(|bias| float("the bias", bias));
    arg_check::check(name, operands.into_iter().chain(bias_too));
    let mask = Mask::new(name, p, key, &x.dims());
    let n = x.dims()[D - 1];
    let [x, residual] = [x, residual].map(Tensor::into_dispatch);
    match bias {
        Some(bias) => {
            let [length] = bias.dims();
            assert_eq!(
                n, length,
                "{name}: the bias has {length} elements, but rows have {n}"
            );
            fused(mask, [x, residual, bias.into_dispatch()])
        }
        None => fused(mask, [x, residual]),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, leaf,
        normal, quantized, values,
    };
    use megaburn_mesh::{PositionRng, Purpose};
    use rstest::rstest;

    use super::*;
    use crate::dropout::{dropout, reference};

    fn key(shape: &[usize]) -> DropoutKey {
        DropoutKey::new(PositionRng::new(5, Purpose::Dropout, "blocks.0"), shape)
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([8, 2, 16], [5, 3, 7])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
        #[values(0.0, 0.4)] p: f64,
    ) {
        let [x, residual] = [0, 1].map(|_| leaf(normal(shape).cast(dtype)));
        let bias = normal([shape[2]]);
        let some = Some(bias.clone());
        assert_same_function!(
            tolerance,
            [x, residual, bias],
            bias_dropout_add(x.clone(), some.clone(), residual.clone(), p, key(&shape)),
            reference::bias_dropout_add(x.clone(), some.clone(), residual.clone(), p, key(&shape))
        );
        assert_same_function!(
            tolerance,
            [x, residual],
            bias_dropout_add(x.clone(), None, residual.clone(), p, key(&shape)),
            reference::bias_dropout_add(x.clone(), None, residual.clone(), p, key(&shape))
        );
    }

    #[test]
    fn the_elements_are_dropped_that_dropout_drops() {
        let x = constant([4, 6]);
        let residual = constant([4, 6]);
        let y = bias_dropout_add(x.clone(), None, residual.clone(), 0.5, key(&[4, 6]));
        assert_close(y, residual + dropout(x, 0.5, key(&[4, 6])), 1e-6);
    }

    #[test]
    fn a_probability_of_zero_is_a_sum() {
        let x = constant([4, 6]);
        let residual = constant([4, 6]);
        let bias = constant([6]);
        let y = bias_dropout_add(
            x.clone(),
            Some(bias.clone()),
            residual.clone(),
            0.0,
            key(&[4, 6]),
        );
        assert_same_bits(y, residual + (x + bias.unsqueeze()));
    }

    #[test]
    fn half_precision_is_rounded_once() {
        let inputs = [0, 1].map(|_| constant([5, 9]).cast(DType::BF16));
        let bias = constant([9]);
        let sum = |[x, residual]: [Tensor<2>; 2]| {
            bias_dropout_add(x, Some(bias.clone()), residual, 0.2, key(&[5, 9]))
        };
        let exact = sum(inputs.clone().map(|t| t.cast(DType::F32)));
        assert_eq!(values(sum(inputs)), values(exact.cast(DType::BF16)));
    }

    #[test]
    fn views_are_those_of_the_reference() {
        let x = normal([3, 5, 12]);
        let residual = normal([8, 5, 3]);
        let bias = normal([1]);
        let all = |bias_dropout_add: Op| {
            let x = x.clone().swap_dims(0, 1).narrow(2, 1, 8);
            let bias = Some(bias.clone().expand([8]));
            bias_dropout_add(
                x,
                bias,
                residual.clone().permute([1, 2, 0]),
                0.3,
                key(&[5, 3, 8]),
            )
        };
        assert_same_function!(
            2e-6,
            [x, residual, bias],
            all(bias_dropout_add),
            all(reference::bias_dropout_add)
        );
    }

    type Op = fn(Tensor<3>, Option<Tensor<1>>, Tensor<3>, f64, DropoutKey) -> Tensor<3>;

    #[rstest]
    fn no_rows_give_none_and_the_bias_a_gradient_of_0(#[values(0.0, 0.5)] p: f64) {
        let x = normal([0, 4]);
        let residual = normal([0, 4]);
        let bias = normal([4]);
        let some = Some(bias.clone());
        let y = bias_dropout_add(x.clone(), some, residual.clone(), p, key(&[3, 4]));
        assert_eq!(y.dims(), [0, 4]);
        let grads = y.sum().backward();
        assert_eq!(
            [x, residual].map(|x| x.grad(&grads).unwrap().dims()),
            [[0, 4]; 2]
        );
        assert_eq!(values(bias.grad(&grads).unwrap()), [0.0; 4]);
    }

    fn added(bias: Option<Tensor<1>>, residual: Tensor<2>, p: f64) {
        bias_dropout_add(normal([2, 4]), bias, residual, p, key(&[2, 4]));
    }

    #[rstest]
    #[case::bias(|| added(Some(normal([3])), normal([2, 4]), 0.1), "bias_dropout_add: the bias has 3 elements, but rows have 4")]
    #[case::residual(|| added(None, normal([4, 2]), 0.1), "bias_dropout_add: the shapes or dtypes of x and the residual differ")]
    #[case::dtypes(|| added(None, normal([2, 4]).cast(DType::F16), 0.1), "the shapes or dtypes of x and the residual differ")]
    #[case::dtype(|| added(Some(quantized([4])), normal([2, 4]), 0.1), "the bias is qfloat")]
    #[case::below(|| added(None, normal([2, 4]), -0.1), "bias_dropout_add: probability -0.1 is not in [0, 1)")]
    #[case::nan(|| added(None, normal([2, 4]), f64::NAN), "probability NaN is not in [0, 1)")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
