//! The operations of a transformer on a GPU against the CPU in f32: values and gradients, fresh
//! random inputs, aligned and ragged shapes.

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Distribution, Tensor, TensorData},
};
use megaburn::cuda::gemm::set_tf32;
use megaburn::kernels::{
    AttentionOptions, EmbeddingOptions, LinearOptions, MainGrad, RopeConfig, apply_rope, attention,
    embedding, gelu, layer_norm, linear, rms_norm, swiglu,
};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    ("linear_in_every_form", linear_forms),
    ("weight_gradients_are_summed_in_f32", main_grads),
    ("token_vectors_and_their_gradients", embeddings),
    ("norms", norms),
    ("rope_and_activations", pointwise),
    ("attention_of_every_kind", attentions),
    ("tf32_is_off_until_it_is_asked_for", tf32),
];

const DTYPES: [(DType, f64); 3] = [(DType::F32, 2e-5), (DType::BF16, 2e-2), (DType::F16, 3e-3)];

/// Standard normal numbers that `dtype` holds exactly, on the CPU.
fn normal<const D: usize>(shape: [usize; D], dtype: DType) -> TensorData {
    let x = Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex());
    x.cast(dtype).cast(DType::F32).into_data()
}

fn leaf<const D: usize>(data: &TensorData, device: &Device, dtype: DType) -> Tensor<D> {
    let x = Tensor::<D>::from_data(data.clone(), (&device.clone().autodiff(), dtype));
    x.require_grad()
}

fn host<const D: usize>(x: Tensor<D>) -> Result<Vec<f32>, String> {
    let data = x.cast(DType::F32).try_into_data().map_err(|error| error.to_string())?;
    data.try_to_vec().map_err(|error| format!("{error:?}"))
}

/// Whether `found` is as close to `expected` as `tolerance`, relative to the largest element.
pub(crate) fn close(
    what: &str,
    found: &[f32],
    expected: &[f32],
    tolerance: f64,
) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} elements for {}", found.len(), expected.len()));
    }
    let size = expected.iter().fold(1e-3f64, |size, x| size.max(f64::from(x.abs())));
    let mut worst = 0.0f64;
    for (a, b) in found.iter().zip(expected) {
        let apart = f64::from((a - b).abs()) / size;
        if apart.is_nan() || apart > worst {
            worst = apart;
        }
        if worst.is_nan() {
            break;
        }
    }
    match worst <= tolerance {
        true => Ok(()),
        false => Err(format!("{what}: {worst:.2e} apart, allowed {tolerance:.0e}")),
    }
}

/// Runs `$body` on the GPU in `$dtype` and on the CPU in f32, on the same numbers, and compares values
/// and the gradients of all inputs.
macro_rules! compare {
    ($what:expr, $dtype:expr, $tolerance:expr, [$($input:ident: $shape:expr),+], $body:expr) => {{
        let dtype: DType = $dtype;
        $(let $input = normal($shape, dtype);)+
        let mut found: [Vec<Vec<f32>>; 2] = Default::default();
        let mut weight = None;
        let devices = [(Device::flex(), DType::F32), (Device::cuda(0), dtype)];
        for ((device, dtype), found) in devices.into_iter().zip(&mut found) {
            $(let $input = leaf(&$input, &device, dtype);)+
            #[allow(clippy::redundant_closure_call, reason = "the closure is the macro's argument")]
            let y = ($body)(&device, $($input.clone()),+);
            let weight = weight.get_or_insert_with(|| normal(y.dims(), $dtype)).clone();
            found.push(host(y.clone())?);
            let weight = Tensor::from_data(weight, (&device.autodiff(), y.dtype()));
            let grads = (y * weight).sum().backward();
            $(found.push(host($input.grad(&grads).ok_or("no gradient")?)?);)+
        }
        let names = ["values", $(concat!("gradient of ", stringify!($input))),+];
        let [expected, found] = found;
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            let what = format!("{} {:?} {name}", $what, dtype);
            close(&what, found, expected, $tolerance)?;
        }
    }};
}

fn linear_forms() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, inputs, outputs] in [[64, 2, 128, 256], [7, 3, 37, 65], [1, 1, 5, 1]] {
            for out_in in [false, true] {
                let what = format!("linear {s}x{b}x{inputs}->{outputs} out_in={out_in}");
                let shape = if out_in { [outputs, inputs] } else { [inputs, outputs] };
                let options = || LinearOptions { out_in, main_grad: None };
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
                // Inputs that are views: half of a wider tensor's features, positions swapped.
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
    for (dtype, [t, inputs, outputs]) in
        [(DType::BF16, [256, 128, 64]), (DType::BF16, [33, 65, 17]), (DType::F32, [50, 31, 9])]
    {
        for out_in in [false, true] {
            let shape = if out_in { [outputs, inputs] } else { [inputs, outputs] };
            let w = normal(shape, dtype);
            let batches = [0; 4].map(|_| (normal([t, inputs], dtype), normal([t, outputs], dtype)));
            let sum = |device: &Device, dtype: DType| -> Result<Vec<f32>, String> {
                let main_grad = MainGrad::default();
                main_grad.attach();
                let w: Tensor<2> = leaf(&w, device, dtype);
                for (x, weight) in &batches {
                    let options = LinearOptions { out_in, main_grad: Some(main_grad.clone()) };
                    let y = linear(leaf::<2>(x, device, dtype), w.clone(), None, options);
                    let weight = Tensor::from_data(weight.clone(), (&y.device(), y.dtype()));
                    (y * weight).sum().backward();
                }
                host(main_grad.take().ok_or("no gradient")?)
            };
            let expected = sum(&Device::flex(), DType::F32)?;
            let found = sum(&Device::cuda(0), dtype)?;
            // Nothing is rounded but f32 sums: bf16 inputs are exact.
            close(&format!("main_grad {t} {shape:?} {dtype:?}"), &found, &expected, 2e-6)?;
        }
    }
    Ok(())
}

/// Many tokens of few ids, some of them of another rank's part, in one block of 256 and in several.
fn embeddings() -> Result<(), String> {
    for dtype in [DType::BF16, DType::F32] {
        for ([rows, d], tokens, first) in
            [([50, 64], [300, 3], None), ([40, 36], [700, 1], Some(30)), ([9, 5], [7, 2], Some(2))]
        {
            let table = normal([rows, d], dtype);
            let ids = (0..tokens[0] * tokens[1]).map(|i| (i * i + i / 7) % (rows + 20));
            let last = rows - 1;
            let ids: Vec<i64> =
                ids.map(|id| if first.is_none() { id.min(last) } else { id + 20 } as i64).collect();
            let ids = TensorData::new(ids, tokens);
            let weight = normal([tokens[0], tokens[1], d], dtype);
            let run = |device: &Device, dtype: DType, attached: bool| -> Result<_, String> {
                let main_grad = MainGrad::default();
                if attached {
                    main_grad.attach();
                }
                let options = EmbeddingOptions { first, main_grad: Some(main_grad.clone()) };
                let table: Tensor<2> = leaf(&table, device, dtype);
                let weight = Tensor::<3>::from_data(weight.clone(), (device, dtype));
                let weight = Tensor::from_inner(weight);
                let (mut y, mut grad) = (None, None);
                for _ in 0..2 {
                    let ids = Tensor::<2, Int>::from_data(ids.clone(), device);
                    let found = embedding(table.clone(), ids, options.clone());
                    let grads = (found.clone() * weight.clone()).sum().backward();
                    grad = table.grad(&grads);
                    y = Some(found.inner());
                }
                let grad = if attached { main_grad.take() } else { grad };
                Ok((host(y.ok_or("no vectors")?)?, host(grad.ok_or("no gradient")?)?))
            };
            for attached in [true, false] {
                let what = format!("embedding {rows}x{d} of {tokens:?} {dtype:?} {attached}");
                let (y, grad) = run(&Device::flex(), DType::F32, attached)?;
                let (found_y, found) = run(&Device::cuda(0), dtype, attached)?;
                close(&what, &found_y, &y, 0.0)?;
                let rounded = if attached || dtype == DType::F32 { 2e-6 } else { 4e-3 };
                close(&what, &found, &grad, rounded)?;
                let (_, again) = run(&Device::cuda(0), dtype, attached)?;
                if again != found {
                    return Err(format!("{what}: other bits the second time"));
                }
            }
        }
    }
    Ok(())
}

fn norms() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, n] in [[16, 2, 256], [5, 3, 67]] {
            let what = format!("norm {s}x{b}x{n}");
            compare!(what, dtype, tolerance, [x: [s, b, n], gamma: [n]], |_, x, gamma| {
                rms_norm::<3>(x, gamma, 1e-5)
            });
            compare!(what, dtype, tolerance, [x: [s, b, n], gamma: [n], beta: [n]], |_,
                x,
                gamma,
                beta| {
                layer_norm::<3>(x, gamma, Some(beta), 1e-5)
            });
        }
    }
    Ok(())
}

fn pointwise() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [s, b, h, d] in [[16, 2, 4, 64], [7, 1, 3, 10]] {
            let what = format!("{s}x{b}x{h}x{d}");
            compare!(format!("rope {what}"), dtype, tolerance, [x: [s, b, h, d]], |device: &Device,
                x| {
                let table = RopeConfig::new(d).init(3..3 + s, device);
                apply_rope(x, &table.expect("it can be"))
            });
            compare!(format!("swiglu {what}"), dtype, tolerance, [x: [s, b, 2 * d]], |_, x| {
                swiglu::<3>(x)
            });
            compare!(format!("gelu {what}"), dtype, tolerance, [x: [s, b, d]], |_, x| {
                gelu::<3>(x)
            });
        }
    }
    Ok(())
}

fn attentions() -> Result<(), String> {
    let options = |causal, query_offset, window| AttentionOptions {
        scale: None,
        causal,
        query_offset,
        window,
    };
    for (dtype, tolerance) in DTYPES {
        for ([s_q, s_k, b, hq, hkv, d], options) in [
            ([128, 128, 2, 4, 2, 64], options(true, 0, None)),
            ([300, 300, 1, 4, 4, 32], options(true, 0, None)),
            ([67, 67, 2, 6, 2, 24], options(true, 0, None)),
            ([67, 67, 2, 6, 2, 24], options(true, 0, Some(9))),
            ([33, 97, 1, 4, 1, 40], options(true, 64, None)),
            ([33, 65, 2, 2, 2, 16], options(false, 0, None)),
            // Queries that see no key.
            ([20, 40, 1, 2, 1, 8], options(true, 30, Some(4))),
            ([40, 10, 1, 2, 1, 8], options(true, 0, Some(3))),
        ] {
            let what = format!("attention {s_q} {s_k} {b} {hq}/{hkv} {d} {options:?}");
            compare!(
                what,
                dtype,
                tolerance,
                [q: [s_q, b, hq, d], k: [s_k, b, hkv, d], v: [s_k, b, hkv, d]],
                |_, q, k, v| attention(q, k, v, options.clone())
            );
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
    let (cpu, gpu) = (Device::flex(), Device::cuda(0));
    let expected = product(&cpu)?;
    close("f32", &product(&gpu)?, &expected, 2e-6)?;
    set_tf32(true);
    let rounded = product(&gpu);
    set_tf32(false);
    let rounded = rounded?;
    close("tf32", &rounded, &expected, 2e-3)?;
    match close("tf32", &rounded, &expected, 1e-5) {
        Ok(()) => Err("nothing was rounded to tf32".into()),
        Err(_) => close("f32 again", &product(&gpu)?, &expected, 2e-6),
    }
}
