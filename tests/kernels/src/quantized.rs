//! Tests of quantised linear layers: the numbers are those of the CPU to the bit, and the products
//! those of these numbers.

use burn::prelude::Device;
use burn::tensor::{DType, Tensor, TensorData};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{
    AmaxSource, DelayedAmax, LinearOptions, LinearQuantization, MatrixRole, Nvfp4,
    QuantizationCounts, QuantizationRecipe, Scaling, SmallFloat, SummedDim, quantized_linear,
    quantized_numbers,
};

use super::compare::{close, host, leaf, normal};
use super::part;

pub(super) const TESTS: &[super::Test] = &[
    ("numbers_are_those_of_the_cpu", numbers),
    ("products_are_those_of_the_cpu", products),
    ("main_gradients_are_those_of_the_cpu", main_gradients),
    ("lost_elements_are_those_of_the_cpu", lost_elements),
];

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn recipes() -> Vec<QuantizationRecipe> {
    let mut all = Vec::new();
    for scaling in [Scaling::Tensor, Scaling::Blocks, Scaling::Microscaling] {
        for gradients in [SmallFloat::E4m3, SmallFloat::E5m2] {
            for power_of_two_scales in [false, true] {
                all.push(QuantizationRecipe {
                    scaling,
                    forward: SmallFloat::E4m3,
                    gradients,
                    power_of_two_scales,
                });
            }
        }
    }
    for is_on in [true, false] {
        all.push(QuantizationRecipe::nvfp4(Nvfp4 {
            stochastic_rounding: is_on,
            random_hadamard: is_on,
            two_dimensional_weights: is_on,
        }));
    }
    all
}

fn numbers() -> Result<(), String> {
    for recipe in recipes() {
        for role in [MatrixRole::Input, MatrixRole::Weight, MatrixRole::Gradient] {
            for summed in [SummedDim::Rows, SummedDim::Cols] {
                for shape in [[1, 1], [33, 140], [256, 48]] {
                    if !part::is_mine() {
                        continue;
                    }
                    for dtype in FLOATS {
                        let x = normal(shape, dtype);
                        let of = |device: &Device| {
                            let x = Tensor::from_data(x.clone(), (device, dtype));
                            host(quantized_numbers(x, recipe, role, summed))
                        };
                        let [found, expected] = [of(&Device::cuda(0))?, of(&Device::flex())?];
                        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        if bits(&found) != bits(&expected) {
                            return Err(format!(
                                "{recipe:?} {role:?} {summed:?} {shape:?} {dtype:?}"
                            ));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// The result and the gradients of the input, the weight (unless a main gradient takes it) and the
/// bias.
fn run(
    recipe: QuantizationRecipe,
    data: &[TensorData; 4],
    main_grad: Option<MainGrad>,
    device: &Device,
    dtype: DType,
) -> Result<[Vec<f32>; 4], String> {
    let [x, w, bias, dy] = data;
    let x: Tensor<2> = leaf(x, device, dtype);
    let w: Tensor<2> = leaf(w, device, dtype);
    let bias: Tensor<1> = leaf(bias, device, dtype);
    let options = LinearOptions {
        main_grad: main_grad.clone(),
        ..Default::default()
    };
    let quantization = LinearQuantization::new(recipe);
    let y = quantized_linear(
        x.clone(),
        w.clone(),
        Some(bias.clone()),
        options,
        quantization,
    );
    let dy = Tensor::from_data(dy.clone(), (&y.device(), dtype));
    let grads = (y.clone() * dy).sum().backward();
    let dw = match main_grad {
        Some(_) => Some(w.inner()),
        None => w.grad(&grads),
    };
    let [dx, dbias] = [
        x.grad(&grads),
        bias.grad(&grads).map(|bias| bias.unsqueeze()),
    ];
    let no = || "no gradient".to_string();
    Ok([
        host(y.inner())?,
        host(dx.ok_or_else(no)?)?,
        host(dw.ok_or_else(no)?)?,
        host(dbias.ok_or_else(no)?)?,
    ])
}

fn inputs([t, inputs, outputs]: [usize; 3], dtype: DType) -> [TensorData; 4] {
    [
        normal([t, inputs], dtype),
        normal([inputs, outputs], dtype),
        normal([outputs], dtype),
        normal([t, outputs], dtype),
    ]
}

/// Tensor cores sum the terms of an instruction with about 14 bits of mantissa, and those of the
/// forward product all.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-3,
        DType::F16 => 3e-3,
        _ => 1.5e-2,
    }
}

fn products() -> Result<(), String> {
    for recipe in recipes() {
        for sizes in [
            [64, 128, 48],
            [37, 272, 80],
            [5, 33, 65],
            [6, 24, 32],
            [7, 32, 24],
        ] {
            if !part::is_mine() {
                continue;
            }
            for dtype in FLOATS {
                let data = inputs(sizes, dtype);
                let expected = run(recipe, &data, None, &Device::flex(), DType::F32)?;
                let found = run(recipe, &data, None, &Device::cuda(0), dtype)?;
                for (what, (found, expected)) in ["y", "dx", "dw", "dbias"]
                    .iter()
                    .zip(found.iter().zip(&expected))
                {
                    let what = format!("{what} of {recipe:?} {sizes:?} {dtype:?}");
                    close(&what, found, expected, tolerance(dtype))?;
                }
            }
        }
    }
    Ok(())
}

fn main_gradients() -> Result<(), String> {
    for recipe in recipes() {
        for sizes in [[48, 64, 32], [21, 33, 17], [6, 24, 32]] {
            if !part::is_mine() {
                continue;
            }
            let batches = [0; 3].map(|_| inputs(sizes, DType::BF16));
            let sum = |device: &Device, dtype: DType| -> Result<Vec<f32>, String> {
                let main_grad = MainGrad::default();
                main_grad.attach();
                for data in &batches {
                    run(recipe, data, Some(main_grad.clone()), device, dtype)?;
                }
                host(main_grad.take().ok_or("no gradient")?)
            };
            let found = sum(&Device::cuda(0), DType::BF16)?;
            let expected = sum(&Device::flex(), DType::F32)?;
            close(
                &format!("dw of {recipe:?} {sizes:?}"),
                &found,
                &expected,
                1e-3,
            )?;
        }
    }
    Ok(())
}

/// The counts of elements that saturate and underflow, and the largest magnitudes, of the three
/// matrices of a layer whose scales are those of smaller ones.
fn lost_elements() -> Result<(), String> {
    for recipe in recipes() {
        for dtype in [DType::F32, DType::BF16] {
            if !part::is_mine() {
                continue;
            }
            let [x, w, _, dy] = inputs([33, 48, 140], dtype);
            let of = |device: &Device| -> Result<Vec<f32>, String> {
                let counts = QuantizationCounts::default();
                let delayed = || {
                    let amax = DelayedAmax::new(None);
                    amax.set_derived(Some(Tensor::from_floats([0.75], device)));
                    AmaxSource::Delayed(amax)
                };
                let quantization = LinearQuantization {
                    input: delayed(),
                    weight: delayed(),
                    gradient: delayed(),
                    counts: Some(counts.clone()),
                    ..LinearQuantization::new(recipe)
                };
                // Small and large numbers: some of the small ones become zero.
                let cubes = |data: &TensorData| {
                    let x: Tensor<2> = Tensor::from_data(data.clone(), (device, dtype));
                    x.clone() * x.clone().abs().powf_scalar(7.0)
                };
                let [x, w, dy] = [&x, &w, &dy].map(cubes);
                let [x, w] = [x, w].map(|x| Tensor::<2>::from_inner(x).require_grad());
                let y = quantized_linear(x, w, None, LinearOptions::default(), quantization);
                (y * Tensor::from_inner(dy)).sum().backward();
                let mut all = Vec::new();
                for role in [MatrixRole::Input, MatrixRole::Weight, MatrixRole::Gradient] {
                    let found = counts.take(role).ok_or("a matrix was not counted")?;
                    all.extend(host(found.numbers)?);
                }
                Ok(all)
            };
            let [found, expected] = [of(&Device::cuda(0))?, of(&Device::flex())?];
            let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.01 * b.abs() + 1.0;
            if !found.iter().zip(&expected).all(is_close) || expected[1] == 0.0 {
                return Err(format!("{recipe:?} {dtype:?}: {found:?}, not {expected:?}"));
            }
        }
    }
    Ok(())
}
