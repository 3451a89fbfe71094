//! Tests of linear layers and their gradients.

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor},
};
use megaburn_autograd::MainGrad;
use megaburn_cuda::gemm::{GemmOptions, set_options};
use megaburn_kernels::{EmbeddingOptions, LinearOptions, embedding, linear};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("linear_in_every_form", linear_forms),
    ("weight_gradients_are_summed_in_f32", main_grads),
    (
        "weights_that_somebody_else_keeps_are_asked_for",
        kept_elsewhere,
    ),
    ("tf32_is_off_until_it_is_asked_for", tf32),
];

fn linear_forms() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, inputs, outputs] in [[64, 2, 128, 256], [7, 3, 37, 65], [1, 1, 5, 1]] {
            for out_in in [false, true] {
                let what = format!("linear {s}x{b}x{inputs}->{outputs} out_in={out_in}");
                let shape = if out_in {
                    [outputs, inputs]
                } else {
                    [inputs, outputs]
                };
                let options = || LinearOptions {
                    out_in,
                    ..Default::default()
                };
                compare!(what, dtype, tolerance, [x: [s, b, inputs], w: shape], |_, x, w| {
                    linear::<3>(x, w, None, options())
                });
                compare!(
                    what,
                    dtype,
                    tolerance,
                    [x: [s, b, inputs], w: shape, bias: [outputs]],
                    |_, x, w, bias| linear::<3>(x, w, Some(bias), options())
                );
                // Inputs that are views: half of a wider tensor's features, with positions swapped.
                compare!(what, dtype, tolerance, [x: [b, s, 2 * inputs], w: shape], |_,
                    x: Tensor<3>,
                    w| {
                    linear(x.swap_dims(0, 1).narrow(2, inputs, inputs), w, None, options())
                });
            }
        }
    }
    Ok(())
}

fn main_grads() -> Result<(), String> {
    for (dtype, [t, inputs, outputs]) in [
        (DType::BF16, [256, 128, 64]),
        (DType::BF16, [33, 65, 17]),
        (DType::F32, [50, 31, 9]),
    ] {
        for out_in in [false, true] {
            let shape = if out_in {
                [outputs, inputs]
            } else {
                [inputs, outputs]
            };
            let w = normal(shape, dtype);
            let batches = [0; 4].map(|_| (normal([t, inputs], dtype), normal([t, outputs], dtype)));
            let sum = |device: &Device, dtype: DType| -> Result<Vec<f32>, String> {
                let main_grad = MainGrad::default();
                main_grad.attach();
                let w: Tensor<2> = leaf(&w, device, dtype);
                for (x, weight) in &batches {
                    let options = LinearOptions {
                        out_in,
                        main_grad: Some(main_grad.clone()),
                        ..Default::default()
                    };
                    let y = linear(leaf::<2>(x, device, dtype), w.clone(), None, options);
                    let weight = Tensor::from_data(weight.clone(), (&y.device(), y.dtype()));
                    (y * weight).sum().backward();
                }
                host(main_grad.take().ok_or("no gradient")?)
            };
            let expected = sum(&Device::flex(), DType::F32)?;
            let found = sum(&Device::cuda(0), dtype)?;
            // Only f32 sums are rounded: bf16 inputs are exact.
            close(
                &format!("main_grad {t} {shape:?} {dtype:?}"),
                &found,
                &expected,
                2e-6,
            )?;
        }
    }
    Ok(())
}

/// With `with_source`, the layers hold a NaN placeholder of the weight's shape instead of the
/// weight.
fn kept_elsewhere() -> Result<(), String> {
    for (dtype, [rows, d]) in [(DType::BF16, [64, 128]), (DType::F32, [31, 9])] {
        let w = normal([rows, d], dtype);
        let x = normal([7, 3, d], dtype);
        let device = Device::cuda(0);
        let run = |weight: Tensor<2>, main_grad: &MainGrad| -> Result<_, String> {
            main_grad.attach();
            let x = leaf::<3>(&x, &device, dtype);
            let main_grad = Some(main_grad.clone());
            let options = LinearOptions {
                out_in: true,
                main_grad: main_grad.clone(),
                ..Default::default()
            };
            let y = linear(x.clone(), weight.clone(), None, options);
            let ids = Tensor::<2, Int>::from_data([[3i64, 0, 5], [8, 3, 1]], &device);
            let options = EmbeddingOptions {
                first: None,
                main_grad: main_grad.clone(),
            };
            let vectors = embedding(weight, ids, options);
            let grads = (y.clone().square().sum() + vectors.clone().square().sum()).backward();
            let sum = main_grad
                .and_then(|main_grad| main_grad.take())
                .ok_or("no gradient")?;
            let dx = x.grad(&grads).ok_or("no gradient")?;
            Ok([host(y)?, host(vectors)?, host(dx)?, host(sum)?])
        };
        let whole: Tensor<2> = leaf(&w, &device, dtype);
        let expected = run(whole.clone(), &MainGrad::default())?;
        let kept = MainGrad::default();
        let inner = whole.inner();
        kept.with_source(move |_| inner.clone());
        let nan = Tensor::<2>::full([1, 1], f32::NAN, (&device.clone().autodiff(), dtype));
        let found = run(nan.expand([rows, d]).require_grad(), &kept)?;
        let what = ["linear", "vectors", "dx", "dw"];
        for ((found, expected), what) in found.iter().zip(&expected).zip(what) {
            close(&format!("{what} {dtype:?}"), found, expected, 1e-6)?;
        }
    }
    Ok(())
}

fn tf32() -> Result<(), String> {
    let [a, b] = [0; 2].map(|_| normal([256, 256], DType::F32));
    let product = |device: &Device| {
        let [a, b] = [&a, &b].map(|data| leaf::<2>(data, device, DType::F32));
        host(linear(a, b, None, LinearOptions::default()))
    };
    let cpu = Device::flex();
    let gpu = Device::cuda(0);
    let expected = product(&cpu)?;
    close("f32", &product(&gpu)?, &expected, 2e-6)?;
    let with_tf32 = GemmOptions {
        tf32: true,
        ..GemmOptions::default()
    };
    set_options(&gpu, with_tf32);
    let rounded = product(&gpu);
    set_options(&gpu, GemmOptions::default());
    let rounded = rounded?;
    close("tf32", &rounded, &expected, 2e-3)?;
    match close("tf32", &rounded, &expected, 1e-5) {
        Ok(()) => Err("nothing was rounded to tf32".into()),
        Err(_) => close("f32 again", &product(&gpu)?, &expected, 2e-6),
    }
}
