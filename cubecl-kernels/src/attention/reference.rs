use burn::tensor::{Tensor, TensorData};

use super::AttentionOptions;
use crate::primitive::compute_dtype;
use crate::softmax::{SoftmaxMask, scale_mask_softmax};

/// [`attention`](crate::attention) by its definition, each head with a copy of its keys and values.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<3> {
    let ([s_q, b, hq, d], [s_k, _, hkv, _], dtype) = (q.dims(), k.dims(), q.dtype());
    let heads_of = |x: Tensor<4>| {
        let [s, _, h, d] = x.dims();
        let x = x.cast(compute_dtype(dtype)).reshape([s, b, h, 1, d]);
        x.repeat_dim(3, hq / h).reshape([s, b, hq, d]).permute([1, 2, 0, 3])
    };
    debug_assert!(hq.is_multiple_of(hkv));
    let (q, k, v) = (heads_of(q), heads_of(k), heads_of(v));
    let mut hidden = Vec::with_capacity(s_q * s_k);
    for i in 0..s_q {
        let position = options.query_offset + i;
        hidden.extend((0..s_k).map(|j| {
            let future = options.causal && j > position;
            let past = options.window.is_some_and(|window| position >= j + window);
            future || past
        }));
    }
    let hidden = TensorData::new(hidden, [1, 1, s_q, s_k]);
    let mask = SoftmaxMask::Masked(Tensor::from_data(hidden, &q.device().inner()));
    let scores = q.matmul(k.transpose());
    let out = scale_mask_softmax(scores, mask, options.factor(d)).matmul(v);
    let d_v = out.dims()[3];
    out.permute([2, 0, 1, 3]).reshape([s_q, b, hq * d_v]).cast(dtype)
}
