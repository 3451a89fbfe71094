//! Attention of every kind.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{AttentionOptions, attention};

use super::compare::*;

pub(super) const TESTS: &[super::Test] = &[("attention_of_every_kind", attentions)];

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
