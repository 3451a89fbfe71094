//! Tests of partial attention and of the merge of its results.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_kernels::{
    AttentionKernel, AttentionOptions, OnlineSoftmaxMerge, PartialAttention, add_rows,
    partial_attention, partial_attention_gradients,
};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("parts_of_attention_join_as_on_the_cpu", parts),
    ("parts_through_cudnn_are_those_of_the_cpu", by_cudnn),
    ("sums_of_parts_are_those_of_the_cpu", sums),
    ("rows_are_added_as_on_the_cpu", rows),
];

/// Merges attention over two parts of the keys, and checks the gradients of each part.
fn parts() -> Result<(), String> {
    let s = 75;
    let split = 40;
    let d = 32;
    for (dtype, tolerance) in DTYPES {
        let inputs = [[s, 1, 4, d], [s, 1, 2, d], [s, 1, 2, d], [s, 1, 4, d]]
            .map(|shape| normal(shape, dtype));
        let run = |device: &Device, dtype| {
            let tensor = |data: &TensorData| Tensor::<4>::from_data(data.clone(), (device, dtype));
            let [q, k, v, dout] = inputs.each_ref().map(tensor);
            // The queries of the second range, which see all keys of the first.
            let [q, dout] = [q, dout].map(|x| x.narrow(0, split, s - split));
            let part = |start: usize, len: usize| {
                let keys = [&k, &v].map(|x| x.clone().narrow(0, start, len));
                let query_offset = split - start;
                (
                    keys,
                    AttentionOptions {
                        query_offset,
                        ..AttentionOptions::causal()
                    },
                )
            };
            let ranges = [part(0, split), part(split, s - split)];
            let [first, second] = ranges.each_ref().map(|([k, v], options)| {
                partial_attention(q.clone(), k.clone(), v.clone(), options.clone())
            });
            let whole = first.merge(second);
            let mut found = host(whole.out.clone())?;
            found.extend(host(whole.lse.clone())?);
            for ([k, v], options) in ranges {
                let inputs = [q.clone(), k, v];
                for gradient in
                    partial_attention_gradients(inputs, whole.clone(), dout.clone(), options)
                {
                    found.extend(host(gradient)?);
                }
            }
            Ok::<_, String>(found)
        };
        let expected = run(&Device::flex(), DType::F32)?;
        let found = run(&Device::cuda(0), dtype)?;
        close(
            &format!("attention in parts {dtype:?}"),
            &found,
            &expected,
            tolerance,
        )?;
    }
    Ok(())
}

/// Merges a causal square and the keys before it, as ring attention does.
fn by_cudnn() -> Result<(), String> {
    let kernel = AttentionKernel::Cudnn;
    stretches([128, 64, 64], kernel).and_then(|()| stretches([192, 128, 128], kernel))
}

/// Queries that come after some of the keys, before the last ones.
fn stretches([before, len, d]: [usize; 3], kernel: AttentionKernel) -> Result<(), String> {
    let whole = AttentionOptions {
        kernel,
        ..AttentionOptions::default()
    };
    let causal = AttentionOptions {
        causal: true,
        ..whole.clone()
    };
    let s = before + len;
    let dtype = DType::BF16;
    let inputs = [[len, 2, 4, d], [s, 2, 2, d], [s, 2, 2, d], [len, 2, 4, d]]
        .map(|shape| normal(shape, dtype));
    let run = |device: &Device, dtype| {
        let tensor = |data: &TensorData| Tensor::<4>::from_data(data.clone(), (device, dtype));
        let [q, k, v, dout] = inputs.each_ref().map(tensor);
        let parts = [(0, before, whole.clone()), (before, len, causal.clone())];
        let of = |(start, len, options): &(usize, usize, AttentionOptions)| {
            let [k, v] = [&k, &v].map(|x| x.clone().narrow(0, *start, *len));
            ([q.clone(), k, v], options.clone())
        };
        let mut sum = OnlineSoftmaxMerge::new([len, 2, 4, d]);
        for ([q, k, v], options) in parts.iter().map(of) {
            sum.add(0, partial_attention(q, k, v, options));
        }
        let whole = sum.finish(dtype);
        let mut found = host(whole.out.clone())?;
        found.extend(host(whole.lse.clone())?);
        for (inputs, options) in parts.iter().map(of) {
            for gradient in
                partial_attention_gradients(inputs, whole.clone(), dout.clone(), options)
            {
                found.extend(host(gradient)?);
            }
        }
        Ok::<_, String>(found)
    };
    let expected = run(&Device::flex(), DType::F32)?;
    let found = run(&Device::cuda(0), dtype)?;
    close("attention in stretches", &found, &expected, DTYPES[1].1)
}

/// Random output and LSE of partial attention over `[queries, batch, heads, features]`.
fn part(shape: [usize; 4], dtype: DType) -> [TensorData; 2] {
    let [s_q, b, hq, _] = shape;
    [normal(shape, dtype), normal([b, hq, s_q], DType::F32)]
}

fn sums() -> Result<(), String> {
    for (dtype, tolerance) in DTYPES {
        for (shape, start) in [
            ([40, 2, 3, 128], 0),
            ([67, 1, 4, 64], 33),
            ([9, 3, 1, 24], 4),
            ([5, 1, 2, 256], 1),
            // A head size that is not a multiple of eight.
            ([12, 2, 2, 20], 3),
        ] {
            let [len, b, hq, d_v] = shape;
            let of_some = [len - start, b, hq, d_v];
            let parts = [
                part(shape, dtype),
                part(of_some, dtype),
                part(of_some, dtype),
            ];
            let run = |device: &Device, dtype| {
                let [first, second, third] = parts.each_ref().map(|[out, lse]| PartialAttention {
                    out: Tensor::from_data(out.clone(), (device, dtype)),
                    lse: Tensor::from_data(lse.clone(), (device, DType::F32)),
                });
                let mut sum = OnlineSoftmaxMerge::new(shape);
                sum.add(0, first);
                sum.add(start, second.clone());
                // A part with no visible keys.
                let lse = Tensor::full_like(&third.lse, f32::NEG_INFINITY);
                let none = PartialAttention { lse, ..third };
                sum.add(start, none.clone());
                let whole = sum.finish(DType::F32);
                // A result that is still referenced, e.g. by the launch queue for a while, must not
                // change.
                let mut further = OnlineSoftmaxMerge::new(shape);
                further.add(0, whole.clone());
                further.add(start, second);
                let further = further.finish(DType::F32);
                // Queries before the first added part have no visible keys.
                let mut late = OnlineSoftmaxMerge::new(shape);
                late.add(start, none);
                let mut found = host(whole.out)?;
                found.extend(host(whole.lse)?);
                found.extend(host(further.out)?);
                found.extend(host(further.lse)?);
                found.extend(host(late.finish(DType::F32).out)?);
                Ok::<_, String>(found)
            };
            let expected = run(&Device::flex(), DType::F32)?;
            let found = run(&Device::cuda(0), dtype)?;
            close(
                &format!("sums of {shape:?} from {start}, {dtype:?}"),
                &found,
                &expected,
                tolerance,
            )?;
        }
    }
    Ok(())
}

fn rows() -> Result<(), String> {
    for (dtype, _) in DTYPES {
        for (shape, start, len) in [
            ([40, 2, 3, 16], 7, 20),
            ([5, 1, 1, 3], 4, 1),
            ([6, 1, 2, 9], 0, 6),
        ] {
            let [_, b, h, d] = shape;
            let sum = normal(shape, DType::F32);
            let x = normal([len, b, h, d], dtype);
            let run = |device: &Device| {
                let sum = Tensor::<4>::from_data(sum.clone(), (device, DType::F32));
                let x = Tensor::<4>::from_data(x.clone(), (device, dtype));
                // Another reference to `sum` exists, so it must not be overwritten.
                let held = sum.clone();
                let found = add_rows(sum, start, x.clone());
                let mut all = host(add_rows(found, 0, x))?;
                all.extend(host(held)?);
                Ok::<_, String>(all)
            };
            let expected = run(&Device::flex())?;
            let found = run(&Device::cuda(0))?;
            close(
                &format!("rows of {shape:?}, {dtype:?}"),
                &found,
                &expected,
                1e-6,
            )?;
        }
    }
    Ok(())
}
