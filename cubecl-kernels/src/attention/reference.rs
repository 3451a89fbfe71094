use burn::tensor::{FloatDType, Tensor, TensorData};
use megaburn_autograd::backend_ops::compute_dtype;

use super::options::{AttentionDropout, AttentionOptions};
use crate::dropout::reference::dropout;
use crate::softmax::{SoftmaxMask, scale_mask_softmax};

/// [`attention`](crate::attention) by its definition, with a copy of keys and values for each head.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<3> {
    attend([q, k, v], None, options)
}

/// [`biased_attention`](crate::biased_attention) by its definition, with the bias of all pairs.
pub fn biased_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    bias: Tensor<2>,
    options: AttentionOptions,
) -> Tensor<3> {
    attend([q, k, v], Some(bias), options)
}

fn attend(
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    options: AttentionOptions,
) -> Tensor<3> {
    let [s_q, b, hq, d] = q.dims();
    let [s_k, _, hkv, _] = k.dims();
    let dtype = q.dtype();
    debug_assert!(hq.is_multiple_of(hkv));
    let device = q.device();
    let [q, k, v] = [q, k, v].map(|x| by_head(&x, hq, compute_dtype(dtype)));
    let hidden = TensorData::new(hidden([b, s_q, s_k], &options), [b, 1, s_q, s_k]);
    let mask = SoftmaxMask::Masked(Tensor::from_data(hidden, &device.inner()));
    let mut scores = q.matmul(k.transpose()) * options.factor(d);
    if let Some(cap) = options.soft_cap {
        scores = (scores / cap).tanh() * cap;
    }
    if let Some(bias) = bias {
        let dtype = scores.dtype();
        scores = scores + by_query_and_key(bias, s_q).cast(dtype).unsqueeze_dim(0);
    }
    let mut probabilities = scale_mask_softmax(scores, mask, 1.0);
    if let Some(AttentionDropout { p, key }) = options.dropout {
        probabilities = dropout(probabilities, p, key);
    }
    let out = probabilities.matmul(v);
    let d_v = out.dims()[3];
    out.permute([2, 0, 1, 3])
        .reshape([s_q, b, hq * d_v])
        .cast(dtype)
}

/// Whether a key is hidden from a query, `[b, s_q, s_k]`.
pub(super) fn hidden([b, s_q, s_k]: [usize; 3], options: &AttentionOptions) -> Vec<bool> {
    let mut hidden = vec![true; b * s_q * s_k];
    for piece in options.pieces(b, s_q, s_k) {
        let options = &piece.options;
        for row in piece.rows {
            for (i, at_q) in piece.queries.clone().enumerate() {
                let position = options.query_offset + i;
                for (j, at_k) in piece.keys.clone().enumerate() {
                    let future = options.causal && j > position;
                    let past = options
                        .window
                        .is_some_and(|window| position >= j.saturating_add(window));
                    hidden[(row * s_q + at_q) * s_k + at_k] = future || past;
                }
            }
        }
    }
    hidden
}

/// The bias of each query and key, `[hq, s_q, s_k]`, from that of their distances.
pub(super) fn by_query_and_key(bias: Tensor<2>, s_q: usize) -> Tensor<3> {
    let s_k = bias.dims()[1] + 1 - s_q;
    let of_query = |i: usize| bias.clone().narrow(1, s_q - 1 - i, s_k);
    Tensor::stack((0..s_q).map(of_query).collect(), 1)
}

/// `[b, heads, s, d]` in `dtype`, from `[s, b, h, d]` with `h` dividing `heads`.
pub(super) fn by_head(x: &Tensor<4>, heads: usize, dtype: FloatDType) -> Tensor<4> {
    let [s, b, h, d] = x.dims();
    let x = x.clone().cast(dtype).reshape([s, b, h, 1, d]);
    x.repeat_dim(3, heads / h)
        .reshape([s, b, heads, d])
        .permute([1, 2, 0, 3])
}
