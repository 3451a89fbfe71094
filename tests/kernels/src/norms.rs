//! Tests of RMS norm and layer norm.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{
    FoundAmax, NormAmaxes, NormGrads, NormOptions, layer_norm, layer_norm_add, layer_norm_with,
    rms_norm, rms_norm_add, rms_norm_with,
};

use super::{compare::*, part};

pub(super) const TESTS: &[super::Test] = &[
    ("norms", norms),
    ("norms_of_views_and_large_numbers", views),
    ("norms_of_residual_sums", sums),
    ("norms_of_long_rows", long),
    ("norms_of_many_rows", many),
    ("norms_of_no_rows", none),
    ("found_magnitudes_are_those_of_result_and_gradient", amaxes),
    ("gradients_of_gamma_and_beta_are_summed_in_f32", main_grads),
];

/// Aligned rows, ragged rows, and rows of one element.
const SHAPES: [[usize; 3]; 6] = [
    [16, 2, 256],
    [5, 3, 67],
    [1, 1, 3],
    [3, 1, 1],
    [3, 2, 1028],
    [2, 1, 4096],
];

fn norms() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in SHAPES {
            let what = format!("norm {s}x{b}x{n}");
            // The RMS norm of a single element is its sign, whose gradient is only rounding error.
            let epsilon = if n == 1 { 8.0 } else { 1e-2 };
            compare!(format!("rms {what}"), dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                rms_norm::<3>(x, gamma, epsilon)
            });
            let shifted = NormOptions::new(epsilon).with_zero_centered_gamma(true);
            compare!(format!("rms shifted {what}"), dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                rms_norm_with::<3>(x, gamma, shifted.clone())
            });
            // For few elements, most of a layer norm's input gradient is rounding error, too.
            let tolerance = if n <= 3 { 3.0 * tolerance } else { tolerance };
            compare!(format!("layer {what}"), dtype, tolerance, [x: [s, b, n], gamma: [n], beta: [n]], |_,
                x,
                gamma,
                beta| {
                layer_norm::<3>(x, gamma, Some(beta), epsilon)
            });
            compare!(format!("layer shifted {what}"), dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                layer_norm_with::<3>(x, gamma, None, shifted.clone())
            });
        }
    }
    Ok(())
}

/// Rows sliced out of longer ones, swapped dimensions, and rows with a mean of 1e4.
fn views() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[4, 3, 256], [5, 2, 66]] {
            let what = format!("view {s}x{b}x{n}");
            compare!(what, dtype, tolerance, [x: [s, b, n + 16], gamma: [n]], |_, x, gamma| {
                let x: Tensor<3> = x;
                rms_norm::<3>(x.narrow(2, 8, n), gamma, 1e-5)
            });
            compare!(what, dtype, tolerance, [x: [b, s, n], gamma: [n], beta: [n]], |_,
                x,
                gamma,
                beta| {
                let x: Tensor<3> = x;
                layer_norm::<3>(x.swap_dims(0, 1), gamma, Some(beta), 1e-5)
            });
            let large = if dtype == DType::F16 { 1024.0 } else { 8192.0 };
            compare!(what, dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                let x: Tensor<3> = x;
                rms_norm::<3>(x * large, gamma, 1e-5) + 0.0
            });
        }
    }
    // A mean that is 1e4 deviations from 0.
    compare!("far", DType::F32, 5e-3, [x: [2, 3, 512], gamma: [512]], |_, x, gamma| {
        let x: Tensor<3> = x;
        layer_norm::<3>(x + 1e4, gamma, None, 1e-5)
    });
    Ok(())
}

fn sums() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[6, 2, 256], [5, 3, 67]] {
            let what = format!("sum {s}x{b}x{n}");
            let shape = [s, b, n];
            let v = [n];
            // Gradients of both results, of the normalized rows only, and of the sum only.
            for weights in [[1.0, 0.5], [1.0, 0.0], [0.0, 1.0]] {
                let join = |(y, sum): (Tensor<3>, Tensor<3>)| match weights {
                    [_, 0.0] => y,
                    [0.0, _] => sum,
                    [_, weight] => Tensor::cat(vec![y, sum * weight], 1),
                };
                if weights[0] != 0.0 {
                    compare!(what, dtype, tolerance, [x: shape, r: shape, gamma: v], |_, x, r, gamma| {
                        join(rms_norm_add::<3>(x, r, gamma, 1e-5))
                    });
                    compare!(what, dtype, tolerance, [x: shape, r: shape, gamma: v, beta: v], |_,
                        x,
                        r,
                        gamma,
                        beta| {
                        join(layer_norm_add::<3>(x, r, gamma, Some(beta), 1e-5))
                    });
                } else {
                    compare!(what, dtype, tolerance, [x: shape, r: shape], |device: &Device, x, r| {
                        let gamma = Tensor::ones([n], &device.clone().autodiff());
                        join(rms_norm_add::<3>(x, r, gamma, 1e-5))
                    });
                }
            }
        }
    }
    Ok(())
}

/// More than four rows per group of the backward kernel, so that it cycles through all stages; with
/// groups of one plane and of two.
fn many() -> Result<(), String> {
    let (dtype, tolerance) = DTYPES[1];
    for [s, n] in [[21_700, 8], [10_810, 520]] {
        let shape = [s, n];
        let what = format!("many {s}x{n}");
        compare!(what, dtype, tolerance, [x: shape, gamma: [n]], |_, x, gamma| {
            rms_norm::<2>(x, gamma, 1e-5)
        });
        compare!(what, dtype, tolerance, [x: shape, gamma: [n], beta: [n]], |_, x, gamma, beta| {
            layer_norm::<2>(x, gamma, Some(beta), 1e-5)
        });
        compare!(what, dtype, tolerance, [x: shape, r: shape, gamma: [n]], |_, x, r, gamma| {
            let (y, sum) = rms_norm_add::<2>(x, r, gamma, 1e-5);
            Tensor::cat(vec![y, sum], 0)
        });
    }
    Ok(())
}

/// Rows of which each unit holds many vectors, and rows too long for registers.
fn long() -> Result<(), String> {
    for (dtype, tolerance) in [DTYPES[0], DTYPES[1]] {
        for [s, n] in [[3, 16384], [2, 8193], [2, 70000]] {
            let what = format!("long {s}x{n}");
            compare!(what, dtype, tolerance, [x: [s, n], gamma: [n]], |_, x, gamma| {
                rms_norm::<2>(x, gamma, 1e-5)
            });
            let shape = [s, n];
            compare!(what, dtype, tolerance, [x: shape, r: shape, gamma: [n], beta: [n]], |_,
                x,
                r,
                gamma,
                beta| {
                let (y, sum) = layer_norm_add::<2>(x, r, gamma, Some(beta), 1e-5);
                Tensor::cat(vec![y, sum], 0)
            });
        }
    }
    Ok(())
}

fn none() -> Result<(), String> {
    let device = Device::cuda(0).autodiff();
    let x = Tensor::<2>::empty([0, 64], &device).require_grad();
    let gamma = Tensor::<1>::ones([64], &device).require_grad();
    let y = rms_norm(x.clone(), gamma.clone(), 1e-5);
    let grads = y.clone().backward();
    let dims = [y.dims(), x.grad(&grads).ok_or("no gradient")?.dims()];
    let dgamma = host(gamma.grad(&grads).ok_or("no gradient")?)?;
    if dims == [[0, 64]; 2] && dgamma == [0.0; 64] {
        Ok(())
    } else {
        Err(format!("{dims:?} {dgamma:?}"))
    }
}

/// Three batches, each of which adds to the main gradients of the previous ones.
fn main_grads() -> Result<(), String> {
    for (dtype, tolerance) in [(DType::BF16, 2e-2), (DType::F32, 1e-5)] {
        for [t, n] in [[64, 256], [5000, 8], [33, 67]] {
            let gamma = normal([n], dtype);
            let beta = normal([n], dtype);
            let batches = [0; 3].map(|_| (normal([t, n], dtype), normal([t, n], dtype)));
            for is_layer_norm in [false, true] {
                let sums = |device: &Device, dtype: DType| -> Result<Vec<Vec<f32>>, String> {
                    let [of_gamma, of_beta] = [0; 2].map(|_| MainGrad::default());
                    of_gamma.attach();
                    of_beta.attach();
                    let main_grads = NormGrads {
                        gamma: Some(of_gamma.clone()),
                        beta: is_layer_norm.then(|| of_beta.clone()),
                    };
                    let options = NormOptions::new(1e-5).with_main_grads(main_grads);
                    let gamma: Tensor<1> = leaf(&gamma, device, dtype);
                    let beta: Tensor<1> = leaf(&beta, device, dtype);
                    for (x, weight) in &batches {
                        let x: Tensor<2> = leaf(x, device, dtype);
                        let y = if is_layer_norm {
                            let beta = Some(beta.clone());
                            layer_norm_with(x, gamma.clone(), beta, options.clone())
                        } else {
                            rms_norm_with(x, gamma.clone(), options.clone())
                        };
                        let weight = Tensor::from_data(weight.clone(), (&y.device(), y.dtype()));
                        let grads = (y * weight).sum().backward();
                        if gamma.grad(&grads).is_some() {
                            return Err("an ordinary gradient of gamma too".to_string());
                        }
                    }
                    let wanted = if is_layer_norm {
                        vec![of_gamma, of_beta]
                    } else {
                        vec![of_gamma]
                    };
                    let sums = wanted
                        .into_iter()
                        .map(|of| host(of.take().ok_or("no gradient")?));
                    sums.collect()
                };
                let expected = sums(&Device::flex(), DType::F32)?;
                let found = sums(&Device::cuda(0), dtype)?;
                for (name, (found, expected)) in
                    ["gamma", "beta"].iter().zip(found.iter().zip(&expected))
                {
                    let what = format!("{name} of {t}x{n} {dtype:?}, layer norm {is_layer_norm}");
                    close(&what, found, expected, tolerance)?;
                }
            }
        }
    }
    Ok(())
}

/// The result of a norm and the gradient of its input: of a layer norm, or of an RMS norm of a sum.
fn observed(
    is_layer_norm: bool,
    [x, residual, dy]: [&TensorData; 3],
    [gamma, beta]: [&TensorData; 2],
    dtype: DType,
    amaxes: NormAmaxes,
) -> Result<[Vec<f32>; 2], String> {
    let device = Device::cuda(0);
    let x: Tensor<2> = leaf(x, &device, dtype);
    let [gamma, beta] = [gamma, beta].map(|of| leaf::<1>(of, &device, dtype));
    let options = NormOptions::new(1e-3).with_amaxes(amaxes);
    let (y, sum) = match is_layer_norm {
        true => (layer_norm_with(x.clone(), gamma, Some(beta), options), None),
        false => {
            let residual: Tensor<2> = leaf(residual, &device, dtype);
            let (y, sum) = rms_norm_add(x.clone(), residual, gamma, options);
            (y, Some(sum))
        }
    };
    let dy = Tensor::from_data(dy.clone(), (&y.device(), dtype));
    let loss = (y.clone() * dy.clone()).sum();
    let loss = match sum {
        Some(sum) => loss + (sum * dy).sum(),
        None => loss,
    };
    let dx = x.grad(&loss.backward()).ok_or("no gradient")?;
    Ok([host(y.inner())?, host(dx)?])
}

/// Rows of one plane and of several, rows of 1024 units and rows too long for registers, with the
/// numbers that are not finite too. What is found changes no bit.
fn amaxes() -> Result<(), String> {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let largest = |x: &[f32]| x.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
    for dtype in [DType::BF16, DType::F32] {
        for [rows, n] in [[40, 64], [7, 67], [3, 1028], [2, 16384], [2, 8195]] {
            for is_layer_norm in [false, true] {
                if !part::is_mine() {
                    continue;
                }
                let [x, residual, dy] = [0; 3].map(|_| normal([rows, n], dtype));
                let [gamma, beta] = [0; 2].map(|_| normal([n], dtype));
                let mut infinite = gamma.try_to_vec::<f32>().map_err(|e| e.to_string())?;
                infinite[n - 1] = f32::INFINITY;
                let infinite = TensorData::new(infinite, [n]);
                let mut odd = x.try_to_vec::<f32>().map_err(|e| e.to_string())?;
                odd[n / 2] = f32::NAN;
                let odd = TensorData::new(odd, [rows, n]);
                for (x, gamma) in [(&x, &gamma), (&x, &infinite), (&odd, &gamma)] {
                    let run = |amaxes| {
                        let [x, gamma] = [x, gamma];
                        let rows = [x, &residual, &dy];
                        observed(is_layer_norm, rows, [gamma, &beta], dtype, amaxes)
                    };
                    let expected = run(NormAmaxes::default())?;
                    let [result, gradient] = <[FoundAmax; 2]>::default();
                    let of_both = NormAmaxes {
                        result: Some(result.clone()),
                        gradient: Some(gradient.clone()),
                    };
                    let found = run(of_both)?;
                    let what = format!("{rows}x{n} {dtype:?}, layer norm: {is_layer_norm}");
                    for i in 0..2 {
                        if bits(&found[i]) != bits(&expected[i]) {
                            return Err(format!("{what}: other bits"));
                        }
                        let amax = [&result, &gradient][i].value().ok_or("nothing was found")?;
                        let amax = host(amax)?[0];
                        let wanted = f32::from_bits(largest(&expected[i]));
                        if amax.to_bits() != wanted.to_bits() && !(amax.is_nan() && wanted.is_nan())
                        {
                            return Err(format!("{what}: found {amax}, not {wanted}"));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
