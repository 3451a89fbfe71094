//! Attention sinks: a learned logit per head that takes part in the softmax but has no value.
//!
//! With the LSE of the scores known, a sink only scales the result of attention, so every kernel of
//! attention supports sinks. The gradients of queries, keys and values follow from the scaled result
//! and the LSE that includes the sink.
//!
//! Source: Xiao et al. (2023), "Efficient streaming language models with attention sinks",
//! <https://arxiv.org/abs/2309.17453>; OpenAI (2025), gpt-oss; Megatron-LM
//! `--softmax-type learnable`.

use burn::tensor::{Tensor, s};

use super::{PartialAttention, untracked};

impl PartialAttention {
    /// The attention of all keys and of a sink for each query head, given the merged attention of
    /// all keys: `out * sigmoid(lse - sink)`, with the LSE of the scores and the sink.
    ///
    /// # Shapes
    /// `sinks`: `[hq]`
    ///
    /// # Panics
    /// If there are not as many sinks as heads.
    #[must_use]
    pub fn with_sinks(self, sinks: Tensor<1>) -> Self {
        let Self { out, lse } = self;
        let sinks = broadcast(sinks, &lse);
        let most = lse.clone().max_pair(sinks.clone());
        let sum = (lse.clone() - most.clone()).exp() + (sinks - most.clone()).exp();
        let with_sink = most + sum.log();
        let kept = by_row((lse - with_sink.clone()).exp());
        let dtype = out.dtype();
        let out = (out.cast(kept.dtype()) * kept.unsqueeze_dim(3)).cast(dtype);
        Self {
            out,
            lse: with_sink,
        }
    }
}

/// The gradient of the sinks, in f32 (f64 for f64), given the result `whole` of
/// [`with_sinks`](PartialAttention::with_sinks) and its gradient `dout`.
///
/// # Shapes
/// `sinks`, result: `[hq]`; `dout`: as `whole.out`
pub fn sink_gradients(sinks: Tensor<1>, whole: &PartialAttention, dout: Tensor<4>) -> Tensor<1> {
    let PartialAttention { out, lse } = whole;
    let wide = lse.dtype();
    let probability = (broadcast(sinks, lse) - lse.clone()).exp();
    let change = (untracked(dout).cast(wide) * out.clone().cast(wide)).sum_dim(3);
    let rows = by_row(probability) * change.squeeze_dim(3);
    -rows.sum_dim(0).sum_dim(1).slice(s![0, 0, ..]).flatten(0, 2)
}

/// `[hq]` as `[b, hq, s_q]`.
fn broadcast(sinks: Tensor<1>, lse: &Tensor<3>) -> Tensor<3> {
    let [_, heads, _] = lse.dims();
    let [found] = sinks.dims();
    assert_eq!(found, heads, "{found} sinks are given for {heads} heads");
    let sinks = untracked(sinks).cast(lse.dtype());
    sinks.reshape([1, heads, 1]).expand(lse.dims())
}

/// `[b, hq, s_q]` as `[s_q, b, hq]`.
fn by_row(x: Tensor<3>) -> Tensor<3> {
    x.permute([2, 0, 1])
}

#[cfg(test)]
mod tests {
    use burn::tensor::activation::softmax;
    use megaburn_autograd::testing::{assert_close, assert_refused, constant, normal};
    use rstest::rstest;

    use super::*;
    use crate::{AttentionOptions, partial_attention, partial_attention_gradients};

    /// Attention by its definition: the softmax is over the scores and one column of sinks, whose
    /// probabilities are then dropped.
    fn reference([q, k, v]: [Tensor<4>; 3], sinks: Tensor<1>, window: usize) -> Tensor<4> {
        let [len, b, hq, d] = q.dims();
        let repeat = hq / k.dims()[2];
        let by_head = |x: Tensor<4>, times: usize| {
            let [len, b, h, d] = x.dims();
            let x = x.reshape([len, b, h, 1, d]).repeat_dim(3, times);
            x.reshape([len, b, h * times, d]).permute([1, 2, 0, 3])
        };
        let [q, k, v] = [by_head(q, 1), by_head(k, repeat), by_head(v, repeat)];
        let scores = q.matmul(k.swap_dims(2, 3)) / (d as f64).sqrt();
        let mut hidden = vec![0.0f32; len * len];
        for (at, value) in hidden.iter_mut().enumerate() {
            let [row, column] = [at / len, at % len];
            if column > row || row - column >= window {
                *value = -1e30;
            }
        }
        let hidden = Tensor::<1>::from_data(hidden.as_slice(), &scores.device());
        let scores = scores + hidden.reshape([1, 1, len, len]);
        let column = sinks.reshape([1, hq, 1, 1]).expand([b, hq, len, 1]);
        let all = softmax(Tensor::cat(vec![scores, column], 3), 3);
        all.narrow(3, 0, len).matmul(v).permute([2, 0, 1, 3])
    }

    #[rstest]
    #[case([5, 2, 4, 8], 2, 5)]
    #[case([9, 1, 3, 6], 3, 4)]
    #[case([7, 3, 2, 10], 1, 1)]
    fn values_and_gradients_are_those_of_the_definition(
        #[case] shape: [usize; 4],
        #[case] kv_heads: usize,
        #[case] window: usize,
    ) {
        let [len, b, heads, d] = shape;
        let q = normal(shape);
        let [k, v] = [0, 1].map(|_| normal([len, b, kv_heads, d]));
        let sinks = normal([heads]);
        let options = AttentionOptions {
            window: Some(window),
            ..AttentionOptions::causal()
        };
        let inputs = [q, k, v];
        let dout = constant(shape);
        let expected = reference(inputs.clone(), sinks.clone(), window);
        let grads = (expected.clone() * Tensor::from_inner(dout.clone()))
            .sum()
            .backward();
        let [q, k, v] = inputs.clone();
        let whole = partial_attention(q, k, v, options.clone()).with_sinks(sinks.clone());
        assert_close(whole.out.clone(), expected.inner(), 1e-5);
        let of_sinks = sink_gradients(sinks.clone(), &whole, dout.clone());
        assert_close(of_sinks, sinks.grad(&grads).unwrap(), 1e-5);
        let found = partial_attention_gradients(inputs.clone(), whole, dout, options);
        for (input, found) in inputs.iter().zip(found) {
            assert_close(found, input.grad(&grads).unwrap(), 1e-5);
        }
    }

    #[test]
    fn a_query_without_keys_only_sees_the_sink() {
        let nothing = PartialAttention {
            out: Tensor::zeros([1, 1, 1, 2], &Default::default()),
            lse: Tensor::full([1, 1, 1], f32::NEG_INFINITY, &Default::default()),
        };
        let PartialAttention { out, lse } =
            nothing.with_sinks(Tensor::full([1], 0.5, &Default::default()));
        assert!(out.into_data().iter::<f32>().all(|x| x == 0.0));
        assert_eq!(lse.into_data().iter::<f32>().next(), Some(0.5));
    }

    #[test]
    fn another_number_of_sinks_is_refused() {
        let [q, k, v] = [0, 1, 2].map(|_| constant([2, 1, 2, 4]));
        let part = partial_attention(q, k, v, AttentionOptions::causal());
        assert_refused(
            || drop(part.clone().with_sinks(constant([3]))),
            "3 sinks are given for 2 heads",
        );
    }
}
