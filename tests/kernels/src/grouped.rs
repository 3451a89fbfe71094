//! Tests of grouped GEMMs, launched one by one and together.

use std::sync::{Arc, Mutex};

use burn::{
    backend::Cube,
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_autograd::{LinearPass, MainGrad, bucket_slice};
use megaburn_cuda::{CudaError, CudaQueue, Op, tensor};
use megaburn_kernels::{GroupWeight, GroupedGemmChoice, GroupedOptions, grouped_linear};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("stretches_times_a_matrix_each", stretches),
    ("stretches_are_multiplied_together_as_one_by_one", together),
    (
        "gradients_of_stretches_are_summed_together",
        summed_together,
    ),
    ("matrices_of_stretches_are_read_once", read_once),
    ("sums_of_stretches_tell_what_failed", failed),
];

/// Row ranges that start where allocations are aligned, and others, in the result or the gradient
/// of `x`.
fn stretches() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [inputs, outputs] in [[256, 512], [37, 256], [256, 40], [5, 9]] {
            for rows in [&[3, 0, 5][..], &[0, 4, 0], &[70], &[1, 1, 2, 6], &[0, 0]] {
                let what = format!("stretches {rows:?} of {inputs}->{outputs}");
                let x = [rows.iter().sum(), inputs];
                let w = [rows.len() * inputs, outputs];
                compare!(what, dtype, tolerance, [x: x, w: w], |_, x, w: Tensor<2>| {
                    let weight = |i| w.clone().narrow(0, i * inputs, inputs);
                    let group = |i| GroupWeight { weight: weight(i), main_grad: None };
                    grouped_linear(x, rows, (0..rows.len()).map(group).collect(), GroupedOptions::default())
                });
            }
        }
    }
    Ok(())
}

fn by(choice: GroupedGemmChoice) -> GroupedOptions {
    GroupedOptions {
        choice,
        ..Default::default()
    }
}

/// Full and partial tiles in each direction, empty ranges, and transposed matrices.
fn together() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for [inputs, outputs] in [[256, 512], [64, 256], [200, 328], [8, 40], [1032, 96]] {
            for rows in [
                &[128, 128][..],
                &[300, 0, 1, 129, 77],
                &[0, 4, 0],
                &[513],
                &[0, 0],
            ] {
                let what = format!("stretches together {rows:?} of {inputs}->{outputs}");
                let x = [rows.iter().sum(), inputs];
                let w = [rows.len() * inputs, outputs];
                compare!(what, dtype, tolerance, [x: x, w: w], |_, x, w: Tensor<2>| {
                    let weight = |i| w.clone().narrow(0, i * inputs, inputs);
                    let group = |i| GroupWeight { weight: weight(i), main_grad: None };
                    grouped_linear(x, rows, (0..rows.len()).map(group).collect(), by(GroupedGemmChoice::Together))
                });
                // Rows that are slices of wider ones, and matrices that are `[out, in]` in memory.
                let wide = [rows.iter().sum(), 2 * inputs];
                let swapped = [rows.len() * outputs, inputs];
                if rows.iter().sum::<usize>() == 0 {
                    continue;
                }
                compare!(what, dtype, tolerance, [x: wide, w: swapped], |_, x: Tensor<2>, w: Tensor<2>| {
                    let weight = |i| w.clone().narrow(0, i * outputs, outputs).transpose();
                    let group = |i| GroupWeight { weight: weight(i), main_grad: None };
                    let x = x.narrow(1, inputs, inputs);
                    grouped_linear(x, rows, (0..rows.len()).map(group).collect(), by(GroupedGemmChoice::Together))
                });
            }
        }
    }
    Ok(())
}

/// Main gradients in their own memory or in slices of a bucket, started one by one or together. The
/// gradient hooks run for all, in order.
fn summed_together() -> Result<(), String> {
    use GroupedGemmChoice::{Each, Together};
    for (dtype, ways) in [
        (DType::BF16, [Together, Together, Together]),
        (DType::BF16, [Each, Together, Each]),
        (DType::F16, [Together, Each, Together]),
        (DType::BF16, [Each, Each, Each]),
        (DType::F32, [Together, Together, Together]),
    ] {
        for [inputs, outputs] in [[256, 512], [200, 328], [40, 8], [33, 65]] {
            for rows in [&[256, 64][..], &[300, 0, 1, 129, 77], &[0, 0]] {
                let num_rows = rows.iter().sum();
                let w = normal([rows.len() * inputs, outputs], dtype);
                let batch = |way| {
                    (
                        way,
                        normal([num_rows, inputs], dtype),
                        normal([num_rows, outputs], dtype),
                    )
                };
                let batches = ways.map(batch);
                let sums = |device: &Device, dtype: DType| -> Result<Vec<f32>, String> {
                    let main_grads: Vec<_> = rows.iter().map(|_| MainGrad::default()).collect();
                    let len = (inputs * outputs).next_multiple_of(128);
                    let buffer =
                        Tensor::<1>::full([rows.len() * len], f32::NAN, (device, DType::F32));
                    let heard = Arc::new(Mutex::new(Vec::new()));
                    for (i, main_grad) in main_grads.iter().enumerate() {
                        main_grad.attach();
                        let buffer = buffer.clone();
                        let heard = heard.clone();
                        // (Every other one has no bucket slice.)
                        main_grad.with_out_buffer(move || match i % 2 {
                            0 => bucket_slice(&buffer, i * len, [inputs, outputs]),
                            _ => None,
                        });
                        main_grad
                            .on_gradient(move || heard.lock().expect("no thread panics").push(i));
                    }
                    let w: Tensor<2> = leaf(&w, device, dtype);
                    for (way, x, weight) in &batches {
                        let group = |(i, main_grad): (usize, &MainGrad)| GroupWeight {
                            weight: w
                                .clone()
                                .narrow(0, i * inputs, inputs)
                                .detach()
                                .require_grad(),
                            main_grad: Some(main_grad.clone()),
                        };
                        let groups = main_grads.iter().enumerate().map(group).collect();
                        let x: Tensor<2> = leaf(x, device, dtype);
                        let y = grouped_linear(x, rows, groups, by(*way));
                        let weight = Tensor::from_data(weight.clone(), (&y.device(), y.dtype()));
                        (y * weight).sum().backward();
                    }
                    let heard = std::mem::take(&mut *heard.lock().expect("no thread panics"));
                    let each: Vec<usize> = (0..rows.len()).collect();
                    if heard != each.repeat(batches.len()) {
                        return Err(format!("heard of {heard:?}"));
                    }
                    let mut all = Vec::new();
                    for main_grad in main_grads {
                        all.extend(host(main_grad.take().ok_or("no gradient")?)?);
                    }
                    Ok(all)
                };
                let expected = sums(&Device::flex(), DType::F32)?;
                let found = sums(&Device::cuda(0), dtype)?;
                // Only f32 sums are rounded: the inputs are exact.
                let what = format!("sums {ways:?} {rows:?} of {inputs}->{outputs} {dtype:?}");
                close(&what, &found, &expected, 5e-6)?;
            }
        }
    }
    Ok(())
}

/// Each weight's source is asked exactly once per pass and in order, because ranks communicate in
/// it; also where the kernel does not apply and where no product can be written in place.
fn read_once() -> Result<(), String> {
    let device = Device::cuda(0);
    let dtype = DType::BF16;
    let rows = [3, 0, 5];
    for [inputs, outputs] in [[64, 256], [64, 20], [20, 64]] {
        let all = rows.map(|_| leaf::<2>(&normal([inputs, outputs], dtype), &device, dtype));
        let x = normal([8, inputs], dtype);
        let run = |groups: Vec<GroupWeight>| -> Result<_, String> {
            let x: Tensor<2> = leaf(&x, &device, dtype);
            let y = grouped_linear(x.clone(), &rows, groups, by(GroupedGemmChoice::Together));
            let grads = y.clone().square().sum().backward();
            Ok([host(y)?, host(x.grad(&grads).ok_or("no gradient")?)?])
        };
        let plain = |w: &Tensor<2>| GroupWeight {
            weight: w.clone(),
            main_grad: None,
        };
        let expected = run(all.iter().map(plain).collect())?;
        let asked = Arc::new(Mutex::new(Vec::new()));
        let kept = |(i, w): (usize, &Tensor<2>)| {
            let main_grad = MainGrad::default();
            let asked = asked.clone();
            let inner = w.clone().inner();
            main_grad.attach();
            main_grad.with_source(move |pass| {
                asked.lock().expect("no thread panics").push((pass, i));
                inner.clone()
            });
            let nan = Tensor::full([1, 1], f32::NAN, (&device.clone().autodiff(), dtype));
            let weight = Tensor::<2>::expand(nan, [inputs, outputs]).require_grad();
            GroupWeight {
                weight,
                main_grad: Some(main_grad),
            }
        };
        let found = run(all.iter().enumerate().map(kept).collect())?;
        for (found, expected) in found.iter().zip(&expected) {
            close(&format!("kept {inputs}->{outputs}"), found, expected, 1e-6)?;
        }
        let asked = std::mem::take(&mut *asked.lock().expect("no thread panics"));
        let once = [LinearPass::Forward, LinearPass::Backward].into_iter();
        let once: Vec<_> = once
            .flat_map(|pass| (0..3).map(move |i| (pass, i)))
            .collect();
        if asked != once {
            return Err(format!("{inputs}->{outputs}: asked for {asked:?}"));
        }
    }
    Ok(())
}

/// Rows that were never written yield no gradient, whichever kernel sums it.
fn failed() -> Result<(), String> {
    let device = Device::cuda(0).autodiff();
    let rows = [8, 8];
    for products in [GroupedGemmChoice::Together, GroupedGemmChoice::Each] {
        let main_grads = [0; 2].map(|_| MainGrad::default());
        let group = |main_grad: &MainGrad| {
            main_grad.attach();
            let weight = leaf(&normal([64, 64], DType::BF16), &device, DType::BF16);
            GroupWeight {
                weight,
                main_grad: Some(main_grad.clone()),
            }
        };
        let groups: Vec<_> = main_grads.iter().map(group).collect();
        let run = |x: Tensor<2>| {
            grouped_linear(x, &rows, groups.clone(), by(products))
                .sum()
                .backward()
        };
        let x = || leaf::<2>(&normal([16, 64], DType::BF16), &device, DType::BF16);
        run(x());
        let lost = x().inner();
        let cube = lost
            .clone()
            .try_into_primitive::<Cube>()
            .map_err(|error| format!("{error:?}"))?;
        let cube = tensor::from_backend(cube);
        let queue = CudaQueue::of(&cube).ok_or("the tensor is not on a CUDA device")?;
        queue.enqueue(Op::new(|| "rows".into()).writes(&cube), |_, _| {
            Err(CudaError::Refused("on purpose".into()))
        });
        run(Tensor::from_inner(lost));
        for main_grad in main_grads {
            match host(main_grad.take().ok_or("no gradient")?) {
                Err(why) if why.contains("on purpose") => {}
                other => return Err(format!("{products}: {:?}", other.map(|sum| sum.len()))),
            }
        }
    }
    Ok(())
}
