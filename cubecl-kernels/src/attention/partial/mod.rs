//! Attention to a part of the keys, to be merged with attention to other parts. Ring attention (Liu
//! et al., 2023, arXiv:2310.01889) uses it, and so does decoding in chunks of a cache.

mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod merge;
mod partial_attention;
mod sinks;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

use super::checked;
use super::options::AttentionOptions;
pub use merge::{OnlineSoftmaxMerge, add_rows};
pub use partial_attention::PartialAttention;
pub use sinks::sink_gradients;

/// [`attention`](crate::attention) that also returns the LSE, without autodiff:
/// [`partial_attention_gradients`] computes the gradients.
///
/// Inputs may be on a device with autodiff; their graph is ignored, and the result is on the device
/// without autodiff.
///
/// # Shapes
/// As in [`attention`](crate::attention). If the keys start at global key `j` and the queries at
/// global query `i`, the query offset is `i - j`. With a causal mask, queries before `j` see none
/// of these keys and must be left out.
///
/// # Panics
/// As [`attention`](crate::attention).
pub fn partial_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> PartialAttention {
    forward([q, k, v], None, options)
}

/// [`partial_attention`], with a bias of the scores if there is one.
pub(super) fn forward(
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    options: AttentionOptions,
) -> PartialAttention {
    let options = checked([&q, &k, &v], options);
    let inputs = [q, k, v].map(untracked);
    let bias = bias.map(untracked);
    #[cfg(feature = "cuda")]
    if let Some(part) = launch::forward(&inputs, bias.as_ref(), &options) {
        return part;
    }
    fallback::forward(&inputs, bias.as_ref(), &options)
}

/// The gradients of `q`, `k` and `v` of a part, in their dtypes. `whole` is the merged result and
/// LSE of all parts, and `dout` the gradient of that result. The gradients of `q` must be summed
/// over all parts.
///
/// # Shapes
/// As in [`partial_attention`]; `dout` as the result
///
/// # Panics
/// As [`partial_attention`], and if `whole` or `dout` have other shapes.
pub fn partial_attention_gradients(
    inputs: [Tensor<4>; 3],
    whole: PartialAttention,
    dout: Tensor<4>,
    options: AttentionOptions,
) -> [Tensor<4>; 3] {
    gradients(inputs, None, whole, dout, options).0
}

/// [`partial_attention_gradients`], and the gradient of the bias if there is one.
pub(super) fn gradients(
    [q, k, v]: [Tensor<4>; 3],
    bias: Option<Tensor<2>>,
    whole: PartialAttention,
    dout: Tensor<4>,
    options: AttentionOptions,
) -> ([Tensor<4>; 3], Option<Tensor<2>>) {
    let options = checked([&q, &k, &v], options);
    let [s_q, b, hq, _] = q.dims();
    let [.., d_v] = v.dims();
    let expected = ([s_q, b, hq, d_v], [b, hq, s_q]);
    let name = "partial_attention_gradients";
    assert!(
        (whole.out.dims(), whole.lse.dims()) == expected && dout.dims() == expected.0,
        "{name}: out {:?}, lse {:?} and dout {:?} do not match the expected out and lse, \
        {expected:?}",
        whole.out.dims(),
        whole.lse.dims(),
        dout.dims()
    );
    let others = [
        float("out", &whole.out),
        float("lse", &whole.lse),
        float("dout", &dout),
    ];
    arg_check::check(name, [float("q", &q)].into_iter().chain(others));
    let inputs = [q, k, v].map(untracked);
    let whole = PartialAttention {
        out: untracked(whole.out),
        lse: untracked(whole.lse),
    };
    let dout = untracked(dout);
    let bias = bias.map(untracked);
    #[cfg(feature = "cuda")]
    if let Some(gradients) = launch::backward(&inputs, bias.as_ref(), &whole, &dout, &options) {
        return gradients;
    }
    fallback::backward(&inputs, bias, &whole, &dout, &options)
}

fn untracked<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() {
        x.inner()
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_close, assert_refused, constant, normal};
    use megaburn_mesh::{PositionRng, Purpose};
    use rstest::rstest;

    use super::*;
    use crate::{AttentionDropout, DropoutKey, PackedSequences};

    fn causal() -> AttentionOptions {
        AttentionOptions::causal()
    }

    #[rstest]
    #[case(causal())]
    #[case(AttentionOptions { soft_cap: Some(0.8), ..causal() })]
    #[case(AttentionOptions { causal: false, window: Some(3), ..causal() })]
    #[case(AttentionOptions { sequences: Some(PackedSequences::new([[0, 4, 9]; 2])), ..causal() })]
    fn one_part_is_all_of_attention(#[case] options: AttentionOptions) {
        let [q, k, v] = [
            normal([9, 2, 4, 8]),
            normal([9, 2, 2, 8]),
            normal([9, 2, 2, 6]),
        ];
        let dout = constant([9, 2, 4, 6]);
        let y = crate::attention(q.clone(), k.clone(), v.clone(), options.clone());
        let grads = (y.clone() * Tensor::from_inner(dout.clone().reshape([9, 2, 24])))
            .sum()
            .backward();
        let part = partial_attention(q.clone(), k.clone(), v.clone(), options.clone());
        assert_close(part.out.clone().reshape([9, 2, 24]), y.inner(), 1e-6);
        let inputs = [q, k, v];
        let found = partial_attention_gradients(inputs.clone(), part, dout, options);
        for (input, found) in inputs.iter().zip(found) {
            assert_close(found, input.grad(&grads).unwrap(), 1e-5);
        }
    }

    #[rstest]
    #[case(None, None)]
    // The last queries see no key of the first part.
    #[case(Some(5), None)]
    #[case(None, Some(0.3))]
    fn parts_of_the_keys_merge_to_the_whole_and_so_do_their_gradients(
        #[case] window: Option<usize>,
        #[case] dropped: Option<f64>,
    ) {
        // The last five of twelve queries, and keys in three parts.
        let s_q = 5;
        let offset = 7;
        let [q, k, v] = [
            constant([s_q, 2, 4, 8]),
            constant([12, 2, 2, 8]),
            constant([12, 2, 2, 8]),
        ];
        let options = |start: usize| {
            let rng = PositionRng::new(3, Purpose::Dropout, "parts");
            let key = DropoutKey::new(rng, &[2, 4, s_q, 12]).with_offset(3, start);
            let dropout = dropped.map(|p| AttentionDropout::new(p, key));
            AttentionOptions {
                query_offset: offset - start,
                window,
                dropout,
                ..causal()
            }
        };
        let whole = partial_attention(q.clone(), k.clone(), v.clone(), options(0));
        let part = |start: usize, len: usize| {
            [
                q.clone(),
                k.clone().narrow(0, start, len),
                v.clone().narrow(0, start, len),
            ]
        };
        let ranges = [(0, 3), (3, 4), (7, 5)];
        let merged = ranges.map(|(start, len)| {
            let [q, k, v] = part(start, len);
            partial_attention(q, k, v, options(start))
        });
        let merged = merged.into_iter().reduce(PartialAttention::merge).unwrap();
        assert_close(merged.out.clone(), whole.out.clone(), 1e-6);
        assert_close(merged.lse.clone(), whole.lse.clone(), 1e-6);
        let dout = constant([s_q, 2, 4, 8]);
        let expected = partial_attention_gradients(
            [q.clone(), k.clone(), v.clone()],
            whole,
            dout.clone(),
            options(0),
        );
        let found = ranges.map(|(start, len)| {
            partial_attention_gradients(
                part(start, len),
                merged.clone(),
                dout.clone(),
                options(start),
            )
        });
        let [[q_0, k_0, v_0], [q_1, k_1, v_1], [q_2, k_2, v_2]] = found;
        let found = [
            q_0 + q_1 + q_2,
            Tensor::cat(vec![k_0, k_1, k_2], 0),
            Tensor::cat(vec![v_0, v_1, v_2], 0),
        ];
        for (found, expected) in found.into_iter().zip(expected) {
            assert_close(found, expected, 1e-5);
        }
    }

    #[test]
    fn parts_without_keys_merge_to_nothing() {
        let [q, k, v] = [
            constant([2, 1, 1, 4]),
            constant([3, 1, 1, 4]),
            constant([3, 1, 1, 4]),
        ];
        let options = AttentionOptions {
            query_offset: 30,
            window: Some(2),
            ..causal()
        };
        let part = || partial_attention(q.clone(), k.clone(), v.clone(), options.clone());
        let PartialAttention { out, lse } = part().merge(part());
        assert!(out.into_data().iter::<f32>().all(|x| x == 0.0));
        assert!(lse.into_data().iter::<f32>().all(|x| x < -1e29));
    }

    fn gradients(out: [usize; 4], lse: [usize; 3], dout: [usize; 4]) {
        let whole = PartialAttention {
            out: constant(out),
            lse: constant(lse),
        };
        let inputs = [
            constant([3, 2, 4, 8]),
            constant([5, 2, 2, 8]),
            constant([5, 2, 2, 6]),
        ];
        partial_attention_gradients(inputs, whole, constant(dout), causal());
    }

    #[rstest]
    #[case(|| gradients([3, 2, 4, 8], [2, 4, 3], [3, 2, 4, 6]), "partial_attention_gradients: out [3, 2, 4, 8]")]
    #[case(|| gradients([3, 2, 4, 6], [4, 2, 3], [3, 2, 4, 6]), "lse [4, 2, 3]")]
    #[case(|| gradients([3, 2, 4, 6], [2, 4, 3], [3, 2, 1, 6]), "dout [3, 2, 1, 6]")]
    #[case(
        || drop(partial_attention(constant([3, 2, 4, 8]), constant([0, 2, 2, 8]), constant([0, 2, 2, 8]), causal())),
        "no empty dimension"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
