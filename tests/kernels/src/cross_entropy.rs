//! Tests of cross entropy over unsharded logits and over shards of them.

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_autograd::MainGrad;
use megaburn_kernels::{
    CrossEntropyOptions, LinearOptions, cross_entropy, linear_cross_entropy, reference,
};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("losses_and_their_gradients", losses),
    ("logits_of_all_sizes_and_places", places),
    ("logits_that_others_hold_stay", held),
    ("labels_cut_out_of_a_batch", cut_out),
    ("chunks_of_a_linear_map", chunks),
];

/// Labels of all kinds: the first and last token, ignored ones, and others.
fn labels(rows: usize, vocab: usize, ignored: i64) -> Vec<i64> {
    let label = |i: usize| match i % 5 {
        0 => vocab as i64 - 1,
        1 => ignored,
        2 => 0,
        _ => (i * 7919 % vocab) as i64,
    };
    (0..rows).map(label).collect()
}

fn on(labels: &[i64], [s, b]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(labels.to_vec(), [s, b]), device)
}

/// Logits scaled by `size`, exactly representable in `dtype`.
fn logits(shape: [usize; 3], dtype: DType, size: f32) -> TensorData {
    let x = Tensor::<3>::from_data(normal(shape, dtype), &Device::flex()) * size;
    x.cast(dtype).cast(DType::F32).into_data()
}

type Found = (Vec<f32>, Vec<f32>);

/// The reference over unsharded logits in f32 on the CPU: losses, and the gradient of their sum
/// weighted by `weight`.
fn expected(
    x: &TensorData,
    labels: &[i64],
    weight: &TensorData,
    options: CrossEntropyOptions,
) -> Result<Found, String> {
    let cpu = Device::flex();
    let x: Tensor<3> = leaf(x, &cpu, DType::F32);
    let [s, b, _] = x.dims();
    let loss = reference::cross_entropy(x.clone(), on(labels, [s, b], &cpu), options);
    let weight = Tensor::<2>::from_data(weight.clone(), &cpu.autodiff());
    let grads = (loss.clone() * weight).sum().backward();
    Ok((host(loss)?, host(x.grad(&grads).ok_or("no gradient")?)?))
}

/// The same on a GPU, with logits that no other tensor shares.
fn found(
    x: Tensor<3>,
    labels: &[i64],
    weight: &TensorData,
    options: CrossEntropyOptions,
) -> Result<Found, String> {
    let [s, b, _] = x.dims();
    found_of(x, on(labels, [s, b], &Device::cuda(0)), weight, options)
}

fn found_of(
    x: Tensor<3>,
    labels: Tensor<2, Int>,
    weight: &TensorData,
    options: CrossEntropyOptions,
) -> Result<Found, String> {
    let gpu = Device::cuda(0);
    let leaf = Tensor::from_inner(x).require_grad();
    // The operation saves nothing of its result, so the loss may overwrite these logits.
    let x = leaf.clone() * 1.0;
    let loss = cross_entropy(x, labels, options, |own| own);
    let weight = Tensor::<2>::from_data(weight.clone(), &gpu.autodiff());
    let grads = (loss.clone() * weight).sum().backward();
    Ok((host(loss)?, host(leaf.grad(&grads).ok_or("no gradient")?)?))
}

fn compare_with(what: &str, dtype: DType, found: &Found, expected: &Found) -> Result<(), String> {
    close(&format!("{what}: losses"), &found.0, &expected.0, 2e-6)?;
    // The gradient is rounded once; the tolerance is that of the largest element.
    let rounded = [(DType::F32, 2e-6), (DType::BF16, 4e-3), (DType::F16, 5e-4)];
    let tolerance = rounded
        .iter()
        .find(|(of, _)| *of == dtype)
        .map_or(0.0, |(_, t)| *t);
    close(
        &format!("{what}: gradient"),
        &found.1,
        &expected.1,
        tolerance,
    )
}

fn losses() -> Result<(), String> {
    for (dtype, _) in DTYPES {
        for (smoothing, ignore_index) in [(0.0, -100), (0.1, -100), (0.3, 3)] {
            for size in [1.0, 1e4] {
                for ([s, b], columns, vocab) in
                    [([3, 2], 640, 640), ([5, 1], 9, 7), ([2, 3], 2056, 2051)]
                {
                    let what = format!("{s}x{b}x{vocab} of {columns} {dtype:?} {smoothing} {size}");
                    let options = CrossEntropyOptions {
                        smoothing,
                        // The squares of large logits would hide errors of the other terms.
                        z_loss: if size > 1.0 { 0.0 } else { smoothing },
                        ignore_index,
                        ..CrossEntropyOptions::new(vocab)
                    };
                    let x = logits([s, b, columns], dtype, size);
                    let labels = labels(s * b, vocab, ignore_index);
                    let weight = normal([s, b], DType::F32);
                    let expected = expected(&x, &labels, &weight, options)?;
                    let x = Tensor::from_data(x, (&Device::cuda(0), dtype));
                    let found = found(x, &labels, &weight, options)?;
                    compare_with(&what, dtype, &found, &expected)?;
                }
            }
        }
    }
    Ok(())
}

/// Shards of a vocabulary, as ranks hold them: columns sliced out of wider rows, some of only
/// padding, which holds NaN.
fn places() -> Result<(), String> {
    let [s, b] = [3, 2];
    let gpu = Device::cuda(0);
    for (dtype, _) in DTYPES {
        for (parts, columns, vocab) in [(3, 264, 700), (4, 17, 40), (2, 8200, 16300)] {
            for smoothing in [0.0, 0.2] {
                let what = format!("{parts} parts of {columns} {dtype:?} {smoothing}");
                let whole = CrossEntropyOptions {
                    smoothing,
                    ..CrossEntropyOptions::new(vocab)
                };
                let x = normal([s, b, parts * columns], dtype);
                let labels = labels(s * b, vocab, -100);
                let weight = normal([s, b], DType::F32);
                let expected = expected(&x, &labels, &weight, whole)?;
                let padded = Tensor::<3>::from_data(x, (&gpu, dtype));
                let padded = padded.slice_fill([0..s, 0..b, vocab..parts * columns], f32::NAN);
                let cut = |part| padded.clone().narrow(2, part * columns, columns);
                let weights = Tensor::<2>::from_data(weight.clone(), &gpu.clone().autodiff());
                let run = |part: usize, all: Option<Tensor<3>>| -> Result<_, String> {
                    let options = CrossEntropyOptions { part, ..whole };
                    let x = Tensor::from_inner(cut(part)).require_grad();
                    let mut own = None;
                    let loss = cross_entropy(x.clone(), on(&labels, [s, b], &gpu), options, |x| {
                        own = Some(x.clone());
                        // (Where only the statistics matter, those of other ranks are arbitrary.)
                        all.unwrap_or_else(|| x.repeat_dim(0, parts))
                    });
                    let grads = (loss.clone() * weights.clone()).sum().backward();
                    let grad = x.grad(&grads).ok_or("no gradient")?;
                    Ok((loss.inner(), grad, own.ok_or("nothing to exchange")?))
                };
                let all: Result<Vec<_>, String> = (0..parts).map(|i| Ok(run(i, None)?.2)).collect();
                let all = Tensor::cat(all?, 0);
                let mut grads = Vec::new();
                let mut first = None;
                for part in 0..parts {
                    let (loss, grad, _) = run(part, Some(all.clone()))?;
                    grads.push(grad);
                    let loss = host(loss)?;
                    if first.get_or_insert_with(|| loss.clone()) != &loss {
                        return Err(format!("{what}: parts have different losses"));
                    }
                }
                let found = (first.ok_or("no part")?, host(Tensor::cat(grads, 2))?);
                compare_with(&what, dtype, &found, &expected)?;
            }
        }
    }
    Ok(())
}

fn held() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let data = normal([2, 2, 48], DType::F32);
    let x = Tensor::<3>::from_data(data.clone(), &gpu.clone().autodiff()).require_grad();
    let options = CrossEntropyOptions::new(48);
    let loss = cross_entropy(
        x.clone(),
        on(&[0, 5, 7, 47], [2, 2], &gpu),
        options,
        |own| own,
    );
    let _ = host(x.grad(&loss.sum().backward()).ok_or("no gradient")?)?;
    close(
        "logits that are held",
        &host(x.inner())?,
        &host(Tensor::<3>::from_data(data, &gpu))?,
        0.0,
    )
}

/// Compares losses and gradients of the chunked linear cross entropy with those of full logits on
/// the CPU.
fn chunks() -> Result<(), String> {
    let s = 7;
    let b = 2;
    let inputs = 16;
    for (dtype, tolerance) in DTYPES {
        for (columns, vocab, chunk) in [(48, 48, 4), (40, 37, 5), (24, 24, 100)] {
            for (out_in, attached) in [(true, true), (true, false), (false, true), (false, false)] {
                let what = format!("{vocab} by {chunk} {dtype:?} {out_in} {attached}");
                let options = CrossEntropyOptions {
                    smoothing: 0.1,
                    z_loss: 0.2,
                    soft_cap: attached.then_some(1.5),
                    ..CrossEntropyOptions::new(vocab)
                };
                let shape = if out_in {
                    [columns, inputs]
                } else {
                    [inputs, columns]
                };
                let x = normal([s, b, inputs], dtype);
                let w = normal(shape, dtype);
                let weight = normal([s, b], DType::F32);
                let labels = labels(s * b, vocab, -100);
                let run = |device: &Device, dtype: DType| {
                    let main_grad = MainGrad::default();
                    let on_gpu = device != &Device::flex();
                    if on_gpu && attached {
                        main_grad.attach();
                    }
                    let x = leaf::<3>(&x, device, dtype);
                    let w = leaf::<2>(&w, device, dtype);
                    let labels = on(&labels, [s, b], device);
                    let linear = LinearOptions {
                        out_in,
                        main_grad: Some(main_grad.clone()),
                        ..Default::default()
                    };
                    let loss = if on_gpu {
                        let x = x.clone();
                        let w = w.clone();
                        linear_cross_entropy(x, w, labels, linear, options, chunk, |own| own)
                    } else {
                        let logits = reference::linear(x.clone(), w.clone(), None, linear);
                        reference::cross_entropy(logits, labels, options)
                    };
                    let weight = Tensor::<2>::from_data(weight.clone(), &device.clone().autodiff());
                    let grads = (loss.clone() * weight).sum().backward();
                    let dw = w
                        .grad(&grads)
                        .or_else(|| main_grad.take())
                        .ok_or("no gradient")?;
                    let dx = x.grad(&grads).ok_or("no gradient")?;
                    Ok::<_, String>([host(loss)?, host(dx)?, host(dw)?])
                };
                let expected = run(&Device::flex(), DType::F32)?;
                let found = run(&Device::cuda(0), dtype)?;
                for (name, i) in [("losses", 0), ("dx", 1), ("dw", 2)] {
                    close(
                        &format!("{what}: {name}"),
                        &found[i],
                        &expected[i],
                        tolerance,
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// Labels of some samples of a batch, as a data-parallel rank has them: views of all labels.
fn cut_out() -> Result<(), String> {
    let gpu = Device::cuda(0);
    let samples = 3;
    let vocab = 40;
    for s in [5, 16, 33] {
        let all: Vec<i64> = labels(samples * s, vocab, -100);
        let whole = Tensor::<2, Int>::from_data(TensorData::new(all.clone(), [samples, s]), &gpu);
        for (first, count) in [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)] {
            let what = format!("samples {first} and on, {count} of {s} labels");
            let options = CrossEntropyOptions::new(vocab);
            let x = logits([s, count, vocab], DType::F32, 1.0);
            let weight = normal([s, count], DType::F32);
            let of = |i: usize| all[(first + i % count) * s + i / count];
            let mine: Vec<i64> = (0..s * count).map(of).collect();
            let expected = expected(&x, &mine, &weight, options)?;
            let x = Tensor::from_data(x, (&gpu, DType::F32));
            let cut = whole.clone().narrow(0, first, count).swap_dims(0, 1);
            let found = found_of(x, cut, &weight, options)?;
            compare_with(&what, DType::F32, &found, &expected)?;
        }
    }
    Ok(())
}
