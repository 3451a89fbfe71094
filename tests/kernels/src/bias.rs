//! Tests of additions to every row, and of the sums over rows that are their gradients.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{Bias, LinearOptions, add_bias, add_positions, bias_gelu_tanh, linear};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("add_bias", biases),
    ("add_bias_of_views", views),
    ("add_positions", positions),
    ("bias_gradients_are_summed_in_f32", main_grads),
    ("bias_gradients_repeat_to_the_bit", repeats),
];

/// A few rows are summed by one kernel, many by two; ragged features are read element by element.
const SHAPES: [[usize; 3]; 6] = [
    [64, 2, 128],
    [7, 3, 37],
    [1, 1, 5],
    [2100, 1, 40],
    [771, 3, 13],
    [3, 2, 2056],
];

/// Leaves NaN in the memory that the next allocations will get.
fn poison(len: usize) {
    for len in [len, 64 * len, 1024] {
        let nan = Tensor::<1>::full([len], f32::NAN, &Device::cuda(0));
        drop(nan + 1.0);
    }
}

fn biases() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for shape in SHAPES {
            poison(shape[2]);
            let what = format!("add_bias {shape:?}");
            compare!(what, dtype, tolerance, [x: shape, bias: [shape[2]]], |_, x, bias: Tensor<1>| {
                add_bias::<3>(x, bias)
            });
        }
    }
    Ok(())
}

fn views() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[6, 4, 16], [300, 9, 5]] {
            let what = format!("add_bias, half of {s}x{b}x{n} swapped");
            compare!(what, dtype, tolerance, [x: [b, s, 2 * n], bias: [n]], |_,
                x: Tensor<3>,
                bias: Tensor<1>| {
                add_bias(x.swap_dims(0, 1).narrow(2, n, n), bias)
            });
        }
    }
    Ok(())
}

fn positions() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for shape in [
            [64, 4, 128],
            [33, 17, 7],
            [5, 1, 24],
            [1, 3, 9],
            [2, 2500, 8],
        ] {
            poison(shape[2]);
            let [s, _, n] = shape;
            let what = format!("add_positions {shape:?}");
            compare!(what, dtype, tolerance, [x: shape, positions: [s, 1, n]], |_, x, positions| {
                add_positions(x, positions)
            });
        }
    }
    Ok(())
}

/// The layers that have a bias.
#[derive(Clone, Copy, Debug)]
enum Layer {
    Add,
    Linear,
    Gelu,
}

impl Layer {
    fn of(self, x: Tensor<2>, w: Tensor<2>, bias: Bias) -> Tensor<2> {
        match self {
            Self::Add => add_bias(x, bias),
            Self::Linear => {
                let options = LinearOptions {
                    bias_grad: bias.main_grad,
                    ..Default::default()
                };
                linear(x, w, Some(bias.value), options)
            }
            Self::Gelu => bias_gelu_tanh(x, bias),
        }
    }
}

fn main_grads() -> Result<(), String> {
    for (dtype, [t, n]) in [
        (DType::BF16, [2200, 64]),
        (DType::BF16, [33, 17]),
        (DType::F32, [50, 9]),
    ] {
        for layer in [Layer::Add, Layer::Linear, Layer::Gelu] {
            let w = normal([n, n], dtype);
            let bias = normal([n], dtype);
            let batches = [0; 3].map(|_| (normal([t, n], dtype), normal([t, n], dtype)));
            let sum = |device: &Device, dtype: DType| -> Result<Vec<f32>, String> {
                let main_grad = MainGrad::default();
                main_grad.attach();
                let value: Tensor<1> = leaf(&bias, device, dtype);
                for (x, weight) in &batches {
                    poison(n);
                    let bias = Bias {
                        value: value.clone(),
                        main_grad: Some(main_grad.clone()),
                    };
                    let y = layer.of(leaf(x, device, dtype), leaf(&w, device, dtype), bias);
                    let weight = Tensor::from_data(weight.clone(), (&y.device(), y.dtype()));
                    let grads = (y * weight).sum().backward();
                    if value.grad(&grads).is_some() {
                        return Err(format!("{layer:?}: an ordinary gradient too"));
                    }
                }
                host(main_grad.take().ok_or("no gradient")?)
            };
            let expected = sum(&Device::flex(), DType::F32)?;
            let found = sum(&Device::cuda(0), dtype)?;
            // Only f32 sums are rounded: bf16 gradients of results are exact.
            close(
                &format!("{layer:?} {t}x{n} {dtype:?}"),
                &found,
                &expected,
                5e-6,
            )?;
        }
    }
    Ok(())
}

fn repeats() -> Result<(), String> {
    let device = Device::cuda(0);
    let dtype = DType::BF16;
    for shape in [[64, 2, 128], [2311, 1, 24]] {
        let x = normal(shape, dtype);
        let bias = normal([shape[2]], dtype);
        let weight = normal(shape, dtype);
        let gradient = || -> Result<Vec<f32>, String> {
            poison(shape[2]);
            let bias: Tensor<1> = leaf(&bias, &device, dtype);
            let y = add_bias::<3>(leaf(&x, &device, dtype), bias.clone());
            let weight = Tensor::from_data(weight.clone(), (&y.device(), dtype));
            host(
                bias.grad(&(y * weight).sum().backward())
                    .ok_or("no gradient")?,
            )
        };
        if gradient()? != gradient()? {
            return Err(format!("{shape:?}: two gradients of the same differ"));
        }
    }
    Ok(())
}
