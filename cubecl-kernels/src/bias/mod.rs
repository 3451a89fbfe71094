//! Adds vectors to every row: biases and position embeddings.

mod column_sum;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod op;
pub(crate) mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::{MainGrad, fused};

pub(crate) use column_sum::{ColumnSum, bias_gradient};
use op::Addend;

/// A bias and the destination of its gradient.
#[derive(Clone, Debug)]
pub struct Bias {
    /// The values, `[n]`.
    pub value: Tensor<1>,
    /// Accumulates the gradient as `[1, n]`, once attached. With `None` the gradient is an ordinary
    /// one.
    pub main_grad: Option<MainGrad>,
}

impl Bias {
    /// Returns the same values detached from the autodiff graph, without a main gradient.
    #[must_use]
    pub fn inner(self) -> Self {
        Self {
            value: self.value.inner(),
            main_grad: None,
        }
    }

    /// Panics with a message that names `op` if this is not a bias for rows of length `n`.
    pub(crate) fn check(&self, op: &str, n: usize) {
        let [length] = self.value.dims();
        assert_eq!(
            n, length,
            "{op}: the bias has {length} elements, but rows have {n}"
        );
        if let Some(main_grad) = &self.main_grad {
            main_grad.check(op, [1, n]);
        }
    }
}

impl From<Tensor<1>> for Bias {
    fn from(value: Tensor<1>) -> Self {
        Self {
            value,
            main_grad: None,
        }
    }
}

/// `x + bias`, computed in f32 (f64 for f64) and rounded once, to the dtype of `x`.
///
/// The gradient of `x` is the gradient of the result, unchanged. The gradient of the bias is summed
/// over all rows in f32, in a fixed order; on a GPU, a kernel reads the rows once, in their own
/// dtype.
///
/// # Shapes
/// - `x`, result: `[.., n]`
/// - `bias`: `[n]`
///
/// # Panics
/// If the bias is not as long as the last dimension of `x`.
pub fn add_bias<const D: usize>(x: Tensor<D>, bias: impl Into<Bias>) -> Tensor<D> {
    let bias = bias.into();
    arg_check::check("add_bias", [float("x", &x), float("the bias", &bias.value)]);
    bias.check("add_bias", x.dims()[D - 1]);
    let addend = Addend {
        groups: 1,
        main_grad: bias.main_grad,
    };
    let x = x.into_dispatch();
    let bias = bias.value.into_dispatch();
    fused(addend, [x, bias])
}

/// `x + positions`, where every sequence gets the same position vectors. The arithmetic and the
/// gradients are as in [`add_bias`].
///
/// # Shapes
/// - `x`, result: `[s, b, n]`
/// - `positions`: `[s, 1, n]`
///
/// # Panics
/// If `positions` has another shape.
pub fn add_positions(x: Tensor<3>, positions: Tensor<3>) -> Tensor<3> {
    let name = "add_positions";
    arg_check::check(name, [float("x", &x), float("the positions", &positions)]);
    let [s, _, n] = x.dims();
    let found = positions.dims();
    assert_eq!(
        found,
        [s, 1, n],
        "{name}: the positions must be [s, 1, n] of x {:?}, but are {found:?}",
        x.dims()
    );
    let addend = Addend {
        groups: s,
        main_grad: None,
    };
    let x = x.into_dispatch();
    let positions = positions.into_dispatch();
    fused(addend, [x, positions])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_bits, assert_same_function, constant, leaf,
        normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;
    use crate::reference;

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([8, 2, 16], [5, 3, 7], [1, 1, 5])] shape: [usize; 3],
        #[values((DType::F32, 2e-6), (DType::BF16, 2e-2))] (dtype, tolerance): (DType, f64),
    ) {
        let [s, _, n] = shape;
        let x = leaf(normal(shape).cast(dtype));
        let bias = leaf(normal([n]).cast(dtype));
        let positions = leaf(normal([s, 1, n]).cast(dtype));
        assert_same_function!(
            tolerance,
            [x, bias],
            add_bias(x.clone(), bias.clone()),
            reference::add_bias(x.clone(), bias.clone())
        );
        assert_same_function!(
            tolerance,
            [x, positions],
            add_positions(x.clone(), positions.clone()),
            reference::add_positions(x.clone(), positions.clone())
        );
    }

    #[test]
    fn views_are_those_of_the_reference() {
        let x = normal([3, 5, 12]);
        let bias = normal([1]);
        let positions = normal([8, 1, 5]);
        let view = || x.clone().swap_dims(0, 1).narrow(2, 1, 8);
        let bias_view = || bias.clone().expand([8]);
        let positions_view = || positions.clone().permute([2, 1, 0]);
        assert_same_function!(
            5e-6,
            [x, bias],
            add_bias(view(), bias_view()),
            reference::add_bias(view(), bias_view())
        );
        assert_same_function!(
            2e-6,
            [x, positions],
            add_positions(view(), positions_view()),
            reference::add_positions(view(), positions_view())
        );
    }

    #[test]
    fn f32_sums_are_those_of_burn() {
        let x = constant([4, 6]);
        let bias = constant([6]);
        assert_same_bits(add_bias(x.clone(), bias.clone()), x + bias.unsqueeze());
    }

    #[rstest]
    fn an_attached_main_grad_takes_the_gradients_sum(
        #[values(DType::F32, DType::BF16)] dtype: DType,
    ) {
        let bias = leaf(normal([7]).cast(dtype));
        let main_grad = MainGrad::default();
        let with = || Bias {
            value: bias.clone(),
            main_grad: Some(main_grad.clone()),
        };
        let gradients = |x: &Tensor<2>, weight: &Tensor<2>| {
            (add_bias(x.clone(), with()) * weight.clone())
                .sum()
                .backward()
        };
        let mut expected = Tensor::<1>::zeros([7], &bias.device());
        for round in 0..3 {
            let x = leaf(normal([5, 7]).cast(dtype));
            let weight = constant([5, 7]).cast(dtype);
            if round == 0 {
                // The main gradient is not attached yet, so the bias gets an ordinary gradient.
                assert!(bias.grad(&gradients(&x, &weight)).is_some());
                assert!(main_grad.take().is_none());
                main_grad.attach();
            }
            let grads = gradients(&x, &weight);
            assert!(bias.grad(&grads).is_none() && x.grad(&grads).is_some());
            expected = expected + weight.cast(DType::F32).sum_dim(0).reshape([7]);
        }
        let sum = main_grad.take().expect("three gradients");
        assert_eq!((sum.dims(), sum.dtype()), ([1, 7], DType::F32));
        assert_close(sum.reshape([7]), expected.inner(), 1e-6);
    }

    #[rstest]
    #[case([0, 3, 4])]
    #[case([2, 0, 4])]
    #[case([2, 3, 0])]
    fn nothing_gives_nothing_and_gradients_of_0(#[case] shape: [usize; 3]) {
        let [s, _, n] = shape;
        let x = normal(shape);
        let bias = normal([n]);
        let positions = normal([s, 1, n]);
        let grads = add_bias(x.clone(), bias.clone()).sum().backward();
        assert_eq!(x.grad(&grads).unwrap().dims(), shape);
        assert_eq!(values(bias.grad(&grads).unwrap()), vec![0.0; n]);
        let grads = add_positions(x.clone(), positions.clone()).sum().backward();
        assert_eq!(values(positions.grad(&grads).unwrap()), vec![0.0; s * n]);
    }

    fn of_two_biases() {
        let main_grad = MainGrad::default();
        main_grad.attach();
        for n in [3, 5] {
            let bias = Bias {
                value: normal([n]),
                main_grad: Some(main_grad.clone()),
            };
            add_bias(normal([2, n]), bias).sum().backward();
        }
    }

    #[rstest]
    #[case(|| drop(add_bias(normal([2, 4]), normal([3]))), "add_bias: the bias has 3 elements, but rows have 4")]
    #[case(|| drop(add_bias(normal([2, 4]), quantized([4]))), "add_bias: the bias is qfloat")]
    #[case(
        of_two_biases,
        "add_bias: the main gradient is for a weight [1, 3], not [1, 5]"
    )]
    #[case(
        || drop(add_positions(normal([2, 3, 4]), normal([2, 3, 4]))),
        "add_positions: the positions must be [s, 1, n] of x [2, 3, 4], but are [2, 3, 4]"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
