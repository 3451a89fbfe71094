//! Tests of attention with all options and shapes.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{
    AttentionDropout, AttentionKernel, AttentionOptions, DropoutKey, PackedSequences, attention,
};
use megaburn_mesh::{PositionRng, Purpose};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("attention_of_every_kind", attentions),
    ("fused_attention_of_every_head_size", head_sizes),
    ("fused_attention_drops_what_the_cpu_drops", dropout),
    ("fused_attention_reads_views", views),
    ("fused_attention_of_large_numbers", large_numbers),
    ("the_kernel_is_the_one_that_was_chosen", choice),
];

fn attentions() -> Result<(), String> {
    let options = |causal, query_offset, window| AttentionOptions {
        causal,
        query_offset,
        window,
        ..Default::default()
    };
    for (dtype, tolerance) in DTYPES {
        for ([s_q, s_k, b, hq, hkv, d], options) in [
            ([128, 128, 2, 4, 2, 64], options(true, 0, None)),
            ([300, 300, 1, 4, 4, 32], options(true, 0, None)),
            ([67, 67, 2, 6, 2, 24], options(true, 0, None)),
            ([67, 67, 2, 6, 2, 24], options(true, 0, Some(9))),
            ([33, 97, 1, 4, 1, 40], options(true, 64, None)),
            ([33, 65, 2, 2, 2, 16], options(false, 0, None)),
            // Queries without visible keys.
            ([20, 40, 1, 2, 1, 8], options(true, 30, Some(4))),
            ([40, 10, 1, 2, 1, 8], options(true, 0, Some(3))),
            ([90, 90, 2, 4, 2, 32], capped(options(true, 0, None))),
            (
                [90, 90, 2, 4, 2, 32],
                packed([vec![0, 30, 90], vec![0, 66, 67, 90]]),
            ),
            (
                [90, 90, 2, 2, 1, 16],
                AttentionOptions {
                    window: Some(20),
                    ..capped(packed([vec![0, 90], vec![0, 1, 80, 90]]))
                },
            ),
            (
                [90, 90, 1, 2, 1, 16],
                AttentionOptions {
                    causal: false,
                    ..packed([vec![0, 70, 90]])
                },
            ),
            ([40, 90, 2, 2, 1, 16], crossed()),
            ([40, 90, 2, 2, 1, 16], last()),
            (
                [40, 90, 2, 2, 1, 16],
                AttentionOptions {
                    window: Some(12),
                    ..last()
                },
            ),
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

fn capped(options: AttentionOptions) -> AttentionOptions {
    AttentionOptions {
        soft_cap: Some(1.3),
        ..options
    }
}

fn packed<const B: usize>(cu_seqlens: [Vec<usize>; B]) -> AttentionOptions {
    let sequences = Some(PackedSequences::new(cu_seqlens));
    AttentionOptions {
        sequences,
        ..AttentionOptions::causal()
    }
}

/// Packed sequences of 40 queries and 90 keys in total: some have fewer queries than keys, some
/// more, some no queries or no keys.
fn crossed() -> AttentionOptions {
    let queries = PackedSequences::new([[0, 10, 30, 30, 35, 40], [0, 0, 0, 5, 12, 40]]);
    let keys = [[0, 40, 45, 60, 60, 90], [0, 1, 2, 2, 85, 90]];
    AttentionOptions {
        query_offset: 2,
        sequences: Some(queries.with_keys(keys)),
        ..AttentionOptions::causal()
    }
}

/// Queries at the end or in the middle of their sequences.
fn last() -> AttentionOptions {
    let queries = PackedSequences::new([[0, 10, 30, 40], [0, 4, 4, 40]]);
    let keys = [[0, 40, 60, 90], [0, 20, 30, 90]];
    let sequences = queries
        .with_keys(keys)
        .with_offsets([[30, 0, 15], [2, 0, 24]]);
    AttentionOptions {
        sequences: Some(sequences),
        ..AttentionOptions::causal()
    }
}

/// Head sizes of one to sixteen tensor-core steps, value heads of another size, several tiles.
fn head_sizes() -> Result<(), String> {
    let causal = AttentionOptions::causal();
    let window = AttentionOptions {
        window: Some(70),
        ..causal.clone()
    };
    for (dtype, tolerance) in [DTYPES[1], DTYPES[2]] {
        for ([s_q, s_k, hq, hkv, d, d_v], options) in [
            ([150, 150, 2, 1, 128, 128], &causal),
            ([130, 200, 2, 2, 64, 64], &window),
            ([70, 70, 1, 1, 96, 96], &causal),
            ([65, 65, 2, 1, 192, 128], &causal),
            ([40, 70, 1, 1, 256, 256], &AttentionOptions::default()),
            ([33, 33, 1, 1, 160, 160], &causal),
            // For these sizes the padding to panels of 64 columns decides whether a tile fits.
            ([70, 70, 1, 1, 208, 208], &causal),
            ([140, 140, 1, 1, 136, 120], &causal),
        ] {
            let what = format!("attention {s_q} {s_k} {hq}/{hkv} {d} {d_v} {options:?}");
            compare!(
                what,
                dtype,
                tolerance,
                [q: [s_q, 1, hq, d], k: [s_k, 1, hkv, d], v: [s_k, 1, hkv, d_v]],
                |_, q, k, v| attention(q, k, v, options.clone())
            );
        }
    }
    Ok(())
}

/// Dropout with random numbers drawn for two keys at a time or for each key, and for a shard of the
/// heads and queries.
fn dropout() -> Result<(), String> {
    let rng = PositionRng::new(9, Purpose::Dropout, "attention").with_stream(1 << 33);
    let whole = |shape: [usize; 4]| DropoutKey::new(rng, &shape);
    let causal = AttentionOptions::causal();
    for (dtype, tolerance) in [DTYPES[1], DTYPES[2]] {
        for ([s, b, hq, hkv, d], options, key) in [
            ([70, 2, 4, 2, 32], &causal, whole([2, 4, 70, 70])),
            (
                [67, 1, 2, 1, 16],
                &capped(packed([vec![0, 20, 67]])),
                whole([1, 2, 67, 67]),
            ),
            // A shard of a tensor of more than 2^32 elements.
            (
                [40, 1, 2, 2, 16],
                &causal,
                whole([9, 8, 10_000, 10_000])
                    .with_offset(0, 7)
                    .with_offset(1, 4)
                    .with_offset(2, 9_960),
            ),
        ] {
            let dropout = Some(AttentionDropout::new(0.3, key));
            let options = AttentionOptions {
                dropout,
                ..options.clone()
            };
            compare!(
                format!("attention {s} {b} {hq}/{hkv} {d} {options:?}"),
                dtype,
                tolerance,
                [q: [s, b, hq, d], k: [s, b, hkv, d], v: [s, b, hkv, d]],
                |_, q, k, v| attention(q, k, v, options.clone())
            );
        }
    }
    Ok(())
}

/// Queries, keys and values packed in one tensor; some with rows that start at unaligned offsets.
fn views() -> Result<(), String> {
    let hq = 4;
    let hkv = 2;
    for (s, b, d) in [(70, 2, 64), (35, 1, 24), (9, 1, 4)] {
        for start in [0, 3] {
            let width = start + (hq + 2 * hkv) * d;
            compare!(
                format!("attention of views {s} {b} {d} from {start}"),
                DType::BF16,
                DTYPES[1].1,
                [fused: [s, b, width]],
                |_, fused: Tensor<3>| {
                    let part = |from: usize, heads: usize| {
                        fused.clone().narrow(2, start + from * d, heads * d).reshape([s, b, heads, d])
                    };
                    let (q, k, v) = (part(0, hq), part(hq, hkv), part(hq + hkv, hkv));
                    attention(q, k, v, AttentionOptions::causal())
                }
            );
        }
    }
    // Heads whose elements are not contiguous cannot be copied 16 bytes at a time.
    let s = 21;
    let d = 16;
    compare!(
        "attention of queries that lie across",
        DType::BF16,
        DTYPES[1].1,
        [q: [s, 1, d, 2], k: [s, 1, 2, d], v: [s, 1, 2, d]],
        |_, q: Tensor<4>, k, v| attention(q.swap_dims(2, 3), k, v, AttentionOptions::causal())
    );
    Ok(())
}

/// With scores of several hundred nothing overflows, and each row is determined by its largest
/// scores.
fn large_numbers() -> Result<(), String> {
    let shape = [80, 1, 2, 64];
    compare!(
        "attention of scores of hundreds",
        DType::BF16,
        DTYPES[1].1,
        [q: shape, k: shape, v: shape],
        |_, q: Tensor<4>, k, v| attention(q * 32.0, k, v, AttentionOptions::causal())
    );
    // Each query attends to a single key then, so the gradients of queries and keys are only
    // rounding errors around 0: check the values, and that the gradients are finite.
    let [q, k, v] = [0; 3].map(|_| normal(shape, DType::BF16));
    let run = |device: &Device, dtype| {
        let [q, k, v] = [&q, &k, &v].map(|data| leaf::<4>(data, device, dtype));
        let y = attention(q.clone() * 65536.0, k, v, AttentionOptions::causal());
        let grads = y.clone().sum().backward();
        Ok::<_, String>((host(y)?, host(q.grad(&grads).ok_or("no gradient")?)?))
    };
    let (expected, _) = run(&Device::flex(), DType::F32)?;
    let (found, grad) = run(&Device::cuda(0), DType::BF16)?;
    close(
        "attention of scores of a million",
        &found,
        &expected,
        DTYPES[1].1,
    )?;
    if grad.iter().all(|grad| grad.is_finite()) {
        Ok(())
    } else {
        Err("a gradient is not finite".into())
    }
}

/// The fused kernel gives the same bits each time. They differ from those of the fallback, which
/// rounds its probabilities; both are close to the CPU's result.
fn choice() -> Result<(), String> {
    let dtype = DType::BF16;
    let shape = [70, 1, 2, 32];
    let inputs = [0; 3].map(|_| normal(shape, dtype));
    let weight = normal([70, 1, 64], dtype);
    let run_by = |kernel, device: &Device, dtype| {
        let [q, k, v] = inputs.each_ref().map(|data| leaf::<4>(data, device, dtype));
        let options = AttentionOptions {
            kernel,
            ..AttentionOptions::causal()
        };
        let y = attention(q.clone(), k.clone(), v.clone(), options);
        let weight = Tensor::<3>::from_data(weight.clone(), (&y.device(), dtype));
        let grads = (y.clone() * weight).sum().backward();
        let mut found = host(y)?;
        for x in [q, k, v] {
            found.extend(host(x.grad(&grads).ok_or("no gradient")?)?);
        }
        Ok::<_, String>(found)
    };
    let run = |device: &Device, dtype| run_by(AttentionKernel::Auto, device, dtype);
    let gpu = Device::cuda(0);
    let expected = run(&Device::flex(), DType::F32)?;
    let fused = run(&gpu, dtype)?;
    let again = run(&gpu, dtype)?;
    let composed = run_by(AttentionKernel::Reference, &gpu, dtype)?;
    close("fused", &fused, &expected, DTYPES[1].1)?;
    close("composed", &composed, &expected, DTYPES[1].1)?;
    if fused != again {
        return Err("other bits the second time".into());
    }
    if fused == composed {
        Err("both choices are one implementation".into())
    } else {
        Ok(())
    }
}
