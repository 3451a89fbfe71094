//! Tests of attention with a bias by distance.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_kernels::{
    AttentionDropout, AttentionKernel, AttentionOptions, DropoutKey, PackedSequences,
    biased_attention, biased_partial_attention, biased_partial_attention_gradients,
};
use megaburn_mesh::{PositionRng, Purpose};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[
    ("biased_attention_of_every_kind", kinds),
    ("biased_attention_of_every_head_size", head_sizes),
    ("parts_with_a_bias_are_those_of_the_cpu", parts),
    ("the_bits_are_the_same_in_every_run", bits),
];

/// The bias at the edges of tiles, with every option.
fn kinds() -> Result<(), String> {
    let options = |causal, query_offset, window| AttentionOptions {
        causal,
        query_offset,
        window,
        ..Default::default()
    };
    let packed = |queries: [[usize; 3]; 2], keys: [[usize; 3]; 2], causal| AttentionOptions {
        sequences: Some(PackedSequences::new(queries).with_keys(keys)),
        causal,
        ..Default::default()
    };
    let dropped = |p, shape: [usize; 4], options: AttentionOptions| {
        let rng = PositionRng::new(9, Purpose::Dropout, "attention").with_stream(3);
        let dropout = Some(AttentionDropout::new(p, DropoutKey::new(rng, &shape)));
        AttentionOptions { dropout, ..options }
    };
    for (dtype, tolerance) in DTYPES {
        for ([s_q, s_k, b, hq, hkv, d], options) in [
            ([128, 128, 2, 2, 2, 64], options(false, 0, None)),
            ([130, 130, 3, 2, 2, 32], options(true, 0, None)),
            ([67, 67, 2, 6, 2, 24], options(true, 0, Some(9))),
            ([33, 97, 1, 4, 1, 40], options(true, 64, None)),
            ([33, 65, 2, 2, 2, 16], options(false, 0, None)),
            ([1, 40, 2, 2, 2, 16], options(false, 0, None)),
            // Queries without visible keys.
            ([40, 10, 1, 2, 1, 8], options(true, 0, Some(3))),
            (
                [70, 70, 2, 4, 2, 32],
                AttentionOptions {
                    soft_cap: Some(1.3),
                    scale: Some(1.0),
                    ..options(true, 0, None)
                },
            ),
            // Rows with padding, as those of an encoder and of cross attention.
            (
                [90, 90, 2, 2, 2, 16],
                packed(
                    [[0, 30, 90], [0, 90, 90]],
                    [[0, 30, 90], [0, 90, 90]],
                    false,
                ),
            ),
            (
                [40, 90, 2, 2, 1, 16],
                packed([[0, 40, 40], [0, 40, 40]], [[0, 66, 90], [0, 1, 90]], false),
            ),
            (
                [90, 90, 2, 2, 1, 16],
                packed([[0, 30, 90], [0, 66, 90]], [[0, 30, 90], [0, 66, 90]], true),
            ),
            (
                [70, 70, 2, 4, 2, 32],
                dropped(0.3, [2, 4, 70, 70], options(false, 0, None)),
            ),
        ] {
            let what = format!("biased attention {s_q} {s_k} {b} {hq}/{hkv} {d} {options:?}");
            compare!(
                what,
                dtype,
                tolerance,
                [
                    q: [s_q, b, hq, d],
                    k: [s_k, b, hkv, d],
                    v: [s_k, b, hkv, d],
                    bias: [hq, s_q + s_k - 1]
                ],
                |_, q, k, v, bias| biased_attention(q, k, v, bias, options.clone())
            );
        }
    }
    Ok(())
}

/// Head sizes for which the tiles of the bias' kernel differ, and by older instructions.
fn head_sizes() -> Result<(), String> {
    for (dtype, tolerance) in [DTYPES[1], DTYPES[2]] {
        for ([s, d, d_v], tiles) in [
            ([150, 64, 64], ""),
            ([150, 64, 64], "mma"),
            ([70, 128, 128], ""),
            ([70, 128, 128], "mma"),
            ([65, 192, 128], ""),
            ([40, 256, 256], ""),
        ] {
            let tiles = tiles.parse()?;
            let options = AttentionOptions {
                tiles,
                ..AttentionOptions::causal()
            };
            compare!(
                format!("biased attention of heads {s} {d} {d_v} {tiles:?}"),
                dtype,
                tolerance,
                [q: [s, 2, 2, d], k: [s, 2, 2, d], v: [s, 2, 2, d_v], bias: [2, 2 * s - 1]],
                |_, q, k, v, bias| biased_attention(q, k, v, bias, options.clone())
            );
        }
    }
    Ok(())
}

/// The results, the LSE and the gradients of partial attention.
fn parts() -> Result<(), String> {
    let [s_q, s_k, b, h, d] = [45, 70, 2, 2, 32];
    for (dtype, tolerance) in DTYPES {
        let inputs = [
            [s_q, b, h, d],
            [s_k, b, h, d],
            [s_k, b, h, d],
            [s_q, b, h, d],
        ];
        let inputs = inputs.map(|shape| normal(shape, dtype));
        let bias = normal([h, s_q + s_k - 1], dtype);
        let run = |device: &Device, dtype| {
            let tensor = |data: &TensorData| Tensor::<4>::from_data(data.clone(), (device, dtype));
            let [q, k, v, dout] = inputs.each_ref().map(tensor);
            let bias = Tensor::<2>::from_data(bias.clone(), (device, dtype));
            let options = AttentionOptions::default();
            let whole = biased_partial_attention(
                q.clone(),
                k.clone(),
                v.clone(),
                bias.clone(),
                options.clone(),
            );
            let mut found = vec![host(whole.out.clone())?, host(whole.lse.clone())?];
            let (gradients, of_bias) =
                biased_partial_attention_gradients([q, k, v], bias, whole, dout, options);
            for gradient in gradients {
                found.push(host(gradient)?);
            }
            found.push(host(of_bias)?);
            Ok::<_, String>(found)
        };
        let expected = run(&Device::flex(), DType::F32)?;
        let found = run(&Device::cuda(0), dtype)?;
        let names = ["out", "lse", "dq", "dk", "dv", "dbias"];
        for ((name, found), expected) in names.into_iter().zip(&found).zip(&expected) {
            let what = format!("a part with a bias {dtype:?}: {name}");
            close(&what, found, expected, tolerance)?;
        }
    }
    Ok(())
}

/// The kernels' gradients of a bias have the same bits in every run.
fn bits() -> Result<(), String> {
    let [s, b, h, d] = [200, 5, 2, 64];
    let inputs = [0; 3].map(|_| normal([s, b, h, d], DType::BF16));
    let line = normal([h, 2 * s - 1], DType::BF16);
    let run = || {
        let device = Device::cuda(0);
        let [q, k, v] = [0, 1, 2].map(|at| leaf::<4>(&inputs[at], &device, DType::BF16));
        let bias = leaf::<2>(&line, &device, DType::F32);
        let options = AttentionOptions {
            kernel: AttentionKernel::Cubecl,
            ..Default::default()
        };
        let y = biased_attention(q, k, v, bias.clone(), options);
        let grads = y.sum().backward();
        host(bias.grad(&grads).ok_or("no gradient")?)
    };
    let first = run()?;
    for _ in 0..3 {
        if run()? != first {
            return Err("the gradient of a bias differs from run to run".into());
        }
    }
    Ok(())
}
