//! Tests of quantised linear layers: the numbers are those of the CPU to the bit, and the products
//! those of these numbers.

use burn::prelude::Device;
use burn::tensor::{DType, Tensor, TensorData};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{
    AmaxSource, DelayedAmax, FoundAmax, FoundAmaxes, GroupWeight, GroupedOptions, LinearOptions,
    LinearQuantization, MatrixRole, Nvfp4, QuantizationCounts, QuantizationRecipe, Scaling,
    SliceMode, SmallFloat, SummedDim, grouped_linear, quantized_linear, quantized_numbers,
    split_heads, split_heads_observed, swiglu, swiglu_observed,
};

use super::compare::{close, host, leaf, normal};
use super::part;

pub(super) const TESTS: &[super::Test] = &[
    ("numbers_are_those_of_the_cpu", numbers),
    ("products_are_those_of_the_cpu", products),
    ("main_gradients_are_those_of_the_cpu", main_gradients),
    ("experts_are_those_of_the_cpu", experts),
    ("what_activations_find_changes_no_bit", activations),
    ("what_a_split_finds_changes_no_bit", splits),
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
                for shape in [[1, 1], [33, 140], [256, 48], [200, 128], [128, 384]] {
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
            [150, 256, 128],
            [37, 128, 384],
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
        for sizes in [[48, 64, 32], [21, 33, 17], [6, 24, 32], [150, 128, 256]] {
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

/// The result, the gradient of the rows, and the gradients of the matrices one after the other, of
/// which every second one goes to a main gradient.
fn run_experts(
    recipe: QuantizationRecipe,
    rows: &[usize],
    data: &[TensorData],
    device: &Device,
    dtype: DType,
) -> Result<[Vec<f32>; 3], String> {
    let x: Tensor<2> = leaf(&data[0], device, dtype);
    let weights: Vec<Tensor<2>> = data[2..].iter().map(|w| leaf(w, device, dtype)).collect();
    let main_grads: Vec<_> = weights.iter().map(|_| MainGrad::default()).collect();
    let has_main_grad = |i: usize| i % 2 == 1;
    let group = |(i, w): (usize, &Tensor<2>)| GroupWeight {
        weight: w.clone(),
        main_grad: has_main_grad(i).then(|| {
            main_grads[i].attach();
            main_grads[i].clone()
        }),
    };
    let groups = weights.iter().enumerate().map(group).collect();
    let options = GroupedOptions {
        quantizations: vec![LinearQuantization::new(recipe); rows.len()],
        ..Default::default()
    };
    let y = grouped_linear(x.clone(), rows, groups, options);
    let dy = Tensor::from_data(data[1].clone(), (&y.device(), dtype));
    let grads = (y.clone() * dy).sum().backward();
    let no = || "no gradient".to_string();
    let mut of_weights = Vec::new();
    for (i, w) in weights.iter().enumerate() {
        let found = match has_main_grad(i) {
            true => main_grads[i].take(),
            false => w.grad(&grads),
        };
        of_weights.extend(host(found.ok_or_else(no)?)?);
    }
    let dx = x.grad(&grads).ok_or_else(no)?;
    Ok([host(y.inner())?, host(dx)?, of_weights])
}

fn experts() -> Result<(), String> {
    let is_usual = |recipe: &QuantizationRecipe| {
        !recipe.power_of_two_scales && !matches!(recipe.scaling, Scaling::Nvfp4(_))
    };
    for recipe in recipes().into_iter().filter(is_usual) {
        for (rows, [inputs, outputs]) in [
            (&[17, 0, 130, 1][..], [64, 48]),
            (&[5, 40], [272, 512]),
            (&[3, 0, 150], [33, 65]),
            (&[0, 0], [16, 32]),
            (&[150, 0, 17, 128], [128, 256]),
        ] {
            if !part::is_mine() {
                continue;
            }
            for dtype in FLOATS {
                let num_rows = rows.iter().sum::<usize>();
                let mut data = vec![
                    normal([num_rows, inputs], dtype),
                    normal([num_rows, outputs], dtype),
                ];
                data.extend(rows.iter().map(|_| normal([inputs, outputs], dtype)));
                let run = |device: &Device, dtype| run_experts(recipe, rows, &data, device, dtype);
                let expected = run(&Device::flex(), DType::F32)?;
                let found = run(&Device::cuda(0), dtype)?;
                for (what, (found, expected)) in
                    ["y", "dx", "dw"].iter().zip(found.iter().zip(&expected))
                {
                    let sizes = format!("{rows:?} from {inputs} to {outputs}");
                    let what = format!("{what} of {recipe:?} {sizes} {dtype:?}");
                    close(&what, found, expected, tolerance(dtype))?;
                }
            }
        }
    }
    Ok(())
}

/// Two matrices with SwiGLU between them, whose kernels find the largest magnitudes of its result
/// and of its input's gradient, or not: the result and the gradients of the matrices.
fn run_mlp(data: &[TensorData; 4], dtype: DType, finds: bool) -> Result<[Vec<f32>; 3], String> {
    let device = Device::cuda(0);
    let [x, up, down] = [0, 1, 2].map(|i| leaf::<2>(&data[i], &device, dtype));
    let recipe = QuantizationRecipe {
        scaling: Scaling::Tensor,
        forward: SmallFloat::E4m3,
        gradients: SmallFloat::E5m2,
        power_of_two_scales: false,
    };
    let linear = |x: Tensor<2>, w: &Tensor<2>, found| {
        let options = LinearOptions {
            found,
            ..Default::default()
        };
        quantized_linear(x, w.clone(), None, options, LinearQuantization::new(recipe))
    };
    let [result, gradient] = <[FoundAmax; 2]>::default();
    let of_up = FoundAmaxes {
        gradient: finds.then(|| gradient.clone()),
        ..Default::default()
    };
    let of_down = FoundAmaxes {
        input: finds.then(|| result.clone()),
        ..Default::default()
    };
    let hidden = linear(x, &up, of_up);
    let hidden = match finds {
        true => swiglu_observed(hidden, result, gradient),
        false => swiglu(hidden),
    };
    let y = linear(hidden, &down, of_down);
    let dy = Tensor::from_data(data[3].clone(), (&y.device(), dtype));
    let grads = (y.clone() * dy).sum().backward();
    let grad = |w: &Tensor<2>| host(w.grad(&grads).ok_or("no gradient")?);
    Ok([host(y.inner())?, grad(&up)?, grad(&down)?])
}

fn activations() -> Result<(), String> {
    for [tokens, hidden, ffn] in [[64, 128, 96], [37, 48, 272], [5, 33, 7], [300, 16, 1000]] {
        for dtype in FLOATS {
            if !part::is_mine() {
                continue;
            }
            let data = [
                normal([tokens, hidden], dtype),
                normal([hidden, 2 * ffn], dtype),
                normal([ffn, hidden], dtype),
                normal([tokens, hidden], dtype),
            ];
            let [found, expected] = [run_mlp(&data, dtype, true)?, run_mlp(&data, dtype, false)?];
            let bits = |all: &[Vec<f32>; 3]| {
                all.clone()
                    .map(|x| x.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            if bits(&found) != bits(&expected) {
                return Err(format!("{tokens} tokens, {hidden}, {ffn}, {dtype:?}"));
            }
        }
    }
    Ok(())
}

/// The gradient of a matrix whose features are heads of three kinds, and its largest magnitude if a
/// kernel finds it.
fn run_split(
    x: &TensorData,
    dy: &TensorData,
    (head_dim, counts): (usize, [usize; 3]),
    dtype: DType,
    amax: Option<FoundAmax>,
) -> Result<Vec<f32>, String> {
    let x: Tensor<3> = leaf(x, &Device::cuda(0), dtype);
    let cuts = [SliceMode::View; 3];
    let [q, k, v] = match amax {
        Some(amax) => split_heads_observed(x.clone(), head_dim, counts, cuts, amax),
        None => split_heads(x.clone(), head_dim, counts, cuts),
    };
    // The gradient of the second part is a view, and that of the last one is zero.
    let dy: Tensor<4> = Tensor::from_data(dy.clone(), (&q.device(), dtype));
    let of_k = dy.clone().narrow(2, counts[0], counts[1]);
    let loss = (q * dy.narrow(2, 0, counts[0])).sum() + (k * of_k).sum() + v.sum() * 0.0;
    host(x.grad(&loss.backward()).ok_or("no gradient")?)
}

fn splits() -> Result<(), String> {
    for [seq, batch, head_dim] in [[64, 1, 64], [5, 3, 10], [7, 2, 1]] {
        for dtype in FLOATS {
            if !part::is_mine() {
                continue;
            }
            let counts = [4, 2, 2];
            let x = normal([seq, batch, 8 * head_dim], dtype);
            let dy = normal([seq, batch, 8, head_dim], dtype);
            let heads = (head_dim, counts);
            let expected = run_split(&x, &dy, heads, dtype, None)?;
            let found = FoundAmax::default();
            let observed = run_split(&x, &dy, heads, dtype, Some(found.clone()))?;
            let amax = host(found.value().ok_or("nothing was found")?)?;
            let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            if observed != expected || amax != [largest] {
                return Err(format!("{seq} {batch} {head_dim} {dtype:?}: {amax:?}"));
            }
        }
    }
    Ok(())
}

/// The counts of elements that saturate and underflow, and the largest magnitudes, of the three
/// matrices of a layer. A scale of a whole matrix is that of a smaller one.
fn lost_elements() -> Result<(), String> {
    for recipe in recipes() {
        for dtype in [DType::F32, DType::BF16] {
            if !part::is_mine() {
                continue;
            }
            let [x, w, _, dy] = inputs([33, 48, 140], dtype);
            let of = |device: &Device| -> Result<Vec<f32>, String> {
                let counts = QuantizationCounts::default();
                // Only a scale of a whole matrix can be that of another one.
                let source = || match recipe.scaling {
                    Scaling::Tensor => {
                        let amax = DelayedAmax::new(None);
                        amax.set_derived(Some(Tensor::from_floats([0.75], device)));
                        AmaxSource::Delayed(amax)
                    }
                    _ => AmaxSource::default(),
                };
                let quantization = LinearQuantization {
                    input: source(),
                    weight: source(),
                    gradient: source(),
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
