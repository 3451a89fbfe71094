//! Tests of attention through cuDNN, if it is installed. Each test checks that cuDNN itself was
//! used.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_cuda::cudnn::num_plans;
use megaburn_kernels::{AUTO_LEN, AttentionKernel, AttentionOptions, attention};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("attention_of_every_kind", attentions),
    ("attention_of_every_head_size", head_sizes),
    ("attention_reads_views", views),
    ("what_cudnn_cannot_is_cubecls", fallback),
    ("cudnn_follows_and_is_followed_by_kernels", order),
    ("auto_is_cudnns_for_long_sequences_alone", automatic),
];

/// Causal attention through cuDNN.
fn causal_by_cudnn() -> AttentionOptions {
    AttentionOptions {
        kernel: AttentionKernel::Cudnn,
        ..AttentionOptions::causal()
    }
}

/// Runs `test`, which selects cuDNN, and fails unless it created exactly `plans` new plans.
fn with_cudnn(plans: usize, test: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let before = num_plans();
    test()?;
    match num_plans() - before {
        made if made == plans => Ok(()),
        made => Err(format!(
            "{made} plans of cuDNN's, not {plans}: see the warnings"
        )),
    }
}

fn attentions() -> Result<(), String> {
    let causal = causal_by_cudnn();
    let whole = AttentionOptions {
        causal: false,
        ..causal.clone()
    };
    let scaled = AttentionOptions {
        scale: Some(0.2),
        ..causal.clone()
    };
    let half = [DTYPES[1], DTYPES[2]];
    let cases = [
        ([128, 128, 2, 4, 2, 64], &causal),
        ([300, 300, 1, 4, 4, 32], &causal),
        ([67, 67, 2, 6, 2, 24], &scaled),
        ([33, 65, 1, 2, 2, 16], &whole),
        ([70, 33, 2, 4, 1, 40], &whole),
        // Queries after the last key see all keys.
        ([40, 10, 1, 2, 1, 8], &causal),
        ([10, 40, 1, 2, 1, 8], &causal),
        ([1, 50, 2, 4, 2, 64], &whole),
        ([1100, 1100, 1, 4, 1, 128], &causal),
    ];
    with_cudnn(half.len() * cases.len(), || {
        for (dtype, tolerance) in half {
            for ([s_q, s_k, b, hq, hkv, d], options) in cases {
                let what = format!("cuDNN's attention {s_q} {s_k} {b} {hq}/{hkv} {d} {options:?}");
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
    })
}

fn head_sizes() -> Result<(), String> {
    let causal = causal_by_cudnn();
    let whole = AttentionOptions {
        causal: false,
        ..causal.clone()
    };
    let cases = [
        ([150, 150, 2, 1, 128, 128], &causal),
        ([70, 70, 1, 1, 96, 96], &causal),
        ([65, 65, 2, 1, 192, 128], &causal),
        ([40, 70, 2, 1, 256, 256], &whole),
        ([33, 33, 1, 1, 160, 160], &causal),
    ];
    with_cudnn(cases.len(), || {
        let (dtype, tolerance) = DTYPES[1];
        for ([s_q, s_k, hq, hkv, d, d_v], options) in cases {
            let what = format!("cuDNN's attention {s_q} {s_k} {hq}/{hkv} {d} {d_v} {options:?}");
            compare!(
                what,
                dtype,
                tolerance,
                [q: [s_q, 1, hq, d], k: [s_k, 1, hkv, d], v: [s_k, 1, hkv, d_v]],
                |_, q, k, v| attention(q, k, v, options.clone())
            );
        }
        Ok(())
    })
}

/// Queries, keys and values packed in one tensor; one with rows that start at an unaligned offset.
fn views() -> Result<(), String> {
    let hq = 4;
    let hkv = 2;
    let cases = [(72, 2, 64, 0), (35, 1, 24, 0), (35, 1, 32, 3)];
    with_cudnn(cases.len(), || {
        for (s, b, d, start) in cases {
            let width = start + (hq + 2 * hkv) * d;
            compare!(
                format!("cuDNN's attention of views {s} {b} {d} from {start}"),
                DType::BF16,
                DTYPES[1].1,
                [fused: [s, b, width]],
                |_, fused: Tensor<3>| {
                    let part = |from: usize, heads: usize| {
                        fused.clone().narrow(2, start + from * d, heads * d).reshape([s, b, heads, d])
                    };
                    let (q, k, v) = (part(0, hq), part(hq, hkv), part(hq + hkv, hkv));
                    attention(q, k, v, causal_by_cudnn())
                }
            );
        }
        Ok(())
    })
}

/// Windows, offsets, other head sizes and f32 fall back to other kernels.
fn fallback() -> Result<(), String> {
    let causal = causal_by_cudnn();
    let window = AttentionOptions {
        window: Some(9),
        ..causal.clone()
    };
    let offset = AttentionOptions {
        query_offset: 20,
        ..causal.clone()
    };
    with_cudnn(0, || {
        for (dtype, tolerance, d, options) in [
            (DTYPES[1].0, DTYPES[1].1, 32, &window),
            (DTYPES[1].0, DTYPES[1].1, 32, &offset),
            (DTYPES[1].0, DTYPES[1].1, 12, &causal),
            (DTYPES[0].0, DTYPES[0].1, 32, &causal),
        ] {
            compare!(
                format!("attention of {d} {options:?} in cuDNN's stead"),
                dtype,
                tolerance,
                [q: [30, 1, 4, d], k: [50, 1, 2, d], v: [50, 1, 2, d]],
                |_, q, k, v| attention(q, k, v, options.clone())
            );
        }
        Ok(())
    })
}

/// Alternates between cuDNN and CubeCL's kernels without synchronization: each reads the previous
/// one's output, and workspaces are reused.
fn order() -> Result<(), String> {
    let dtype = DType::BF16;
    let shape = [96, 2, 4, 64];
    let inputs = [0; 3].map(|_| normal(shape, dtype));
    let chain = |device: &Device, dtype| {
        let [q, k, v] = inputs.each_ref().map(|data| leaf::<4>(data, device, dtype));
        let mut x = q.clone();
        for _ in 0..4 {
            let y = attention(x * 1.5, k.clone(), v.clone(), causal_by_cudnn());
            x = y.reshape(shape) + q.clone() * 0.5;
        }
        let grads = x.clone().sum().backward();
        Ok::<_, String>([host(x)?, host(v.grad(&grads).ok_or("no gradient")?)?])
    };
    let expected = chain(&Device::flex(), DType::F32)?;
    with_cudnn(1, || {
        let found = chain(&Device::cuda(0), dtype)?;
        for (found, expected) in found.iter().zip(&expected) {
            close("four rounds of cuDNN's attention", found, expected, 6e-2)?;
        }
        Ok(())
    })
}

/// By default cuDNN serves neither shorter sequences nor queries of another length than the keys.
fn automatic() -> Result<(), String> {
    let causal = AttentionOptions::causal();
    let (dtype, tolerance) = DTYPES[1];
    for (s_q, s_k, made) in [
        (AUTO_LEN, AUTO_LEN, 1),
        (AUTO_LEN - 8, AUTO_LEN - 8, 0),
        (8, 1100, 0),
    ] {
        let before = num_plans();
        compare!(
            format!("automatic attention {s_q} {s_k}"),
            dtype,
            tolerance,
            [q: [s_q, 1, 2, 56], k: [s_k, 1, 2, 56], v: [s_k, 1, 2, 56]],
            |_, q, k, v| attention(q, k, v, causal.clone())
        );
        let found = num_plans() - before;
        if found != made {
            return Err(format!(
                "{s_q} queries and {s_k} keys: {found} plans, not {made}"
            ));
        }
    }
    Ok(())
}
