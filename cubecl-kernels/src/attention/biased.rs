//! Attention whose scores have a bias by the distance of query and key.
//!
//! Source: Shaw et al. (2018), <https://arxiv.org/abs/1803.02155>, in the form of Raffel et al.
//! (2020), "Exploring the limits of transfer learning", <https://arxiv.org/abs/1910.10683>, T5.

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::with_autodiff_of;

use super::checked;
use super::op::Attention;
use super::options::AttentionOptions;
use super::partial::{self, PartialAttention};

/// [`attention`](crate::attention) with a bias that is added to the scores, after scale and soft
/// cap: column `j - i + s_q - 1` of its head for key `j` of query `i`. Both are positions in the
/// tensors, also with packed sequences and with a query offset.
///
/// The gradient of the bias is summed over the batch and over all pairs of a distance in f32 (f64
/// for f64). Implementations are those of [`attention`](crate::attention) without cuDNN. The fused
/// kernel recomputes the scores in backward, and needs `4 * hq * s_q * s_k` bytes for a
/// moment.
///
/// # Shapes
/// - `q`, `k`, `v` and the result: as [`attention`](crate::attention)
/// - `bias`: `[hq, s_q + s_k - 1]`
///
/// # Panics
/// As [`attention`](crate::attention), and if the bias has another shape.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use megaburn_kernels::{AttentionOptions, biased_attention};
///
/// let [q, k, v] = [0, 1, 2].map(|_| Tensor::<4>::ones([1, 1, 1, 2], &Device::flex()));
/// let values = Tensor::cat(vec![v.clone(), v * 3.0], 0);
/// let keys = Tensor::cat(vec![k.clone(), k], 0);
/// // The second key is far more probable than the first.
/// let bias = Tensor::<2>::from_floats([[0.0, 50.0]], &Device::flex());
/// let y = biased_attention(q, keys, values, bias, AttentionOptions::default());
/// assert_eq!(y.into_data().iter::<f32>().next(), Some(3.0));
/// ```
pub fn biased_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    bias: Tensor<2>,
    options: AttentionOptions,
) -> Tensor<3> {
    let options = checked([&q, &k, &v], options);
    check_bias(&q, &k, &bias);
    let [s_q, b, hq, _] = q.dims();
    let d_v = v.dims()[3];
    let bias = with_autodiff_of(bias, &q.device());
    let inputs = [
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        bias.into_dispatch(),
    ];
    let y: Tensor<4> = megaburn_autograd::fused(Attention(options), inputs);
    y.reshape([s_q, b, hq * d_v])
}

/// [`partial_attention`](crate::partial_attention) with the bias of [`biased_attention`].
///
/// # Shapes
/// As in [`partial_attention`](crate::partial_attention); `bias` as in [`biased_attention`] for
/// these queries and keys
///
/// # Panics
/// As [`biased_attention`].
pub fn biased_partial_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    bias: Tensor<2>,
    options: AttentionOptions,
) -> PartialAttention {
    check_bias(&q, &k, &bias);
    partial::forward([q, k, v], Some(bias), options)
}

/// [`partial_attention_gradients`](crate::partial_attention_gradients) with the bias of
/// [`biased_attention`]; the second result is the gradient of the bias in its dtype, which must be
/// summed over all parts.
///
/// # Shapes
/// As in [`biased_partial_attention`]; `dout` as the result
///
/// # Panics
/// As [`partial_attention_gradients`](crate::partial_attention_gradients), and if the bias has
/// another shape.
pub fn biased_partial_attention_gradients(
    inputs: [Tensor<4>; 3],
    bias: Tensor<2>,
    whole: PartialAttention,
    dout: Tensor<4>,
    options: AttentionOptions,
) -> ([Tensor<4>; 3], Tensor<2>) {
    check_bias(&inputs[0], &inputs[1], &bias);
    let (gradients, of_bias) = partial::gradients(inputs, Some(bias), whole, dout, options);
    (gradients, of_bias.expect("there is a bias"))
}

fn check_bias(q: &Tensor<4>, k: &Tensor<4>, bias: &Tensor<2>) {
    arg_check::check("biased attention", [float("the bias", bias)]);
    let [s_q, _, hq, _] = q.dims();
    let expected = [hq, (s_q + k.dims()[0]).saturating_sub(1)];
    assert_eq!(
        bias.dims(),
        expected,
        "biased attention: the bias {:?} is not [hq, s_q + s_k - 1], {expected:?}",
        bias.dims()
    );
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_close, assert_refused, assert_same_function, constant, leaf, normal, values,
    };
    use rstest::rstest;

    use super::*;
    use crate::attention::tests::{dropped, options, packed, packed_from, qkv};
    use crate::{attention, partial_attention, reference};

    fn bias_of([s_q, s_k, _, hq, ..]: [usize; 6]) -> Tensor<2> {
        normal([hq, s_q + s_k - 1])
    }

    #[rstest]
    #[case::all_keys([6, 6, 2, 4, 2, 8], options(false, 0, None))]
    #[case::causal([8, 8, 2, 4, 4, 8], options(true, 0, None))]
    #[case::ragged([3, 11, 2, 6, 3, 5], options(false, 0, None))]
    #[case::ragged_with_offset([3, 11, 2, 6, 3, 5], options(true, 4, None))]
    #[case::last_query([1, 9, 2, 4, 2, 8], options(true, 8, None))]
    #[case::one_key([5, 1, 2, 2, 2, 4], options(false, 0, None))]
    #[case::one_pair([1, 1, 3, 2, 1, 4], options(true, 0, None))]
    #[case::two_queries([2, 1, 1, 2, 2, 4], options(false, 0, None))]
    #[case::window([9, 9, 2, 4, 2, 4], options(true, 0, Some(3)))]
    #[case::queries_beyond_the_window([8, 5, 2, 4, 2, 4], options(true, 2, Some(3)))]
    #[case::blocks([80, 80, 1, 4, 2, 4], options(true, 0, None))]
    #[case::ragged_blocks([67, 90, 2, 2, 1, 3], options(true, 20, None))]
    #[case::blocks_with_window([99, 99, 1, 2, 1, 4], options(true, 0, Some(20)))]
    #[case::scale([4, 4, 1, 2, 1, 4], AttentionOptions { scale: Some(0.9), ..AttentionOptions::causal() })]
    #[case::soft_cap([9, 9, 2, 4, 2, 8], AttentionOptions { soft_cap: Some(0.7), ..AttentionOptions::causal() })]
    #[case::packed([9, 9, 2, 4, 2, 4], packed([[0, 4, 9], [0, 8, 9]], [[0, 4, 9], [0, 8, 9]], options(true, 0, None)))]
    #[case::padding([9, 9, 2, 2, 1, 4], packed([[0, 4, 9], [0, 9, 9]], [[0, 4, 9], [0, 9, 9]], options(false, 0, None)))]
    #[case::packed_crossed([7, 12, 2, 4, 2, 4], packed([[0, 0, 5, 7], [0, 3, 4, 7]], [[0, 2, 8, 12], [0, 12, 12, 12]], options(true, 3, None)))]
    #[case::packed_with_offsets([7, 12, 2, 4, 2, 4], packed_from([[0, 2, 5, 7], [0, 3, 4, 7]], [[0, 6, 9, 12], [0, 3, 9, 12]], [[4, 0, 9], [0, 5, 2]], options(true, 1, Some(4))))]
    #[case::dropout([6, 7, 2, 4, 2, 4], dropped(0.4, [2, 4, 6, 7], options(false, 0, None)))]
    #[case::all_of_it([40, 40, 2, 4, 2, 4], AttentionOptions {
        soft_cap: Some(1.5),
        ..dropped(0.2, [2, 4, 40, 40], packed([[0, 33, 40], [0, 3, 40]], [[0, 33, 40], [0, 3, 40]], options(true, 0, Some(9))))
    })]
    fn values_and_gradients_are_those_of_the_reference(
        #[case] shape: [usize; 6],
        #[case] options: AttentionOptions,
    ) {
        let (q, k, v) = qkv(shape);
        let bias = bias_of(shape);
        let inputs = || {
            (
                q.clone(),
                k.clone(),
                v.clone(),
                bias.clone(),
                options.clone(),
            )
        };
        let [fast, slow] = [biased_attention, reference::biased_attention];
        let call = |of: fn(_, _, _, _, _) -> _| {
            let (q, k, v, bias, options) = inputs();
            of(q, k, v, bias, options)
        };
        assert_same_function!(3e-6, [q, k, v, bias], call(fast), call(slow));
    }

    #[rstest]
    #[case(DType::BF16, 3e-2)]
    #[case(DType::F16, 4e-3)]
    fn half_precision_is_computed_in_f32(#[case] dtype: DType, #[case] tolerance: f64) {
        let shape = [6, 6, 2, 4, 2, 8];
        let (q, k, v) = qkv(shape);
        let [q, k, v] = [q, k, v].map(|t| leaf(t.cast(dtype)));
        // The bias has a dtype of its own.
        for bias in [bias_of(shape), leaf(bias_of(shape).cast(dtype))] {
            let call = |of: fn(_, _, _, _, _) -> Tensor<3>| {
                let options = AttentionOptions::causal();
                of(q.clone(), k.clone(), v.clone(), bias.clone(), options)
            };
            assert_eq!(call(biased_attention).dtype(), dtype);
            assert_same_function!(
                tolerance,
                [q, k, v, bias],
                call(biased_attention),
                call(reference::biased_attention)
            );
        }
    }

    #[test]
    fn a_bias_that_falls_with_distance_is_that_of_the_definition() {
        let (q, k, v) = qkv([4, 6, 1, 1, 1, 2]);
        let column = |query: usize, key: usize| key + 3 - query;
        let slopes: Vec<f32> = (0..9).map(|at| at as f32 * 0.3).collect();
        let bias = Tensor::<1>::from_floats(slopes.as_slice(), &q.device());
        let y = biased_attention(
            q.clone(),
            k.clone(),
            v.clone(),
            bias.reshape([1, 9]),
            AttentionOptions::default(),
        );
        let [q, k, v, y] = [q, k, v, y.unsqueeze_dim(2)].map(values);
        for query in 0..4 {
            let weights: Vec<f64> = (0..6)
                .map(|key| {
                    let product: f64 = (0..2).map(|at| q[query * 2 + at] * k[key * 2 + at]).sum();
                    let bias = f64::from(slopes[column(query, key)]);
                    (product / 2f64.sqrt() + bias).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            for at in 0..2 {
                let sum: f64 = (0..6).map(|key| weights[key] * v[key * 2 + at]).sum();
                assert!((y[query * 2 + at] - sum / total).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn a_bias_of_zero_is_none_and_may_be_a_constant() {
        let shape = [9, 9, 2, 4, 2, 8];
        let (q, k, v) = qkv(shape);
        let options = options(true, 0, None);
        let bias = bias_of(shape).inner();
        let zeros = bias.clone() * 0.0;
        let y = biased_attention(q.clone(), k.clone(), v.clone(), zeros, options.clone());
        let plain = attention(q.clone(), k.clone(), v.clone(), options.clone());
        assert_close(y, plain, 1e-6);
        let tracked = leaf(Tensor::from_inner(bias.clone()));
        let weight = constant::<3>([9, 2, 32]);
        let [dq, expected] = [Tensor::from_inner(bias), tracked].map(|bias| {
            let y = biased_attention(q.clone(), k.clone(), v.clone(), bias, options.clone());
            let weight = Tensor::from_inner(weight.clone());
            q.grad(&(y * weight).sum().backward()).unwrap()
        });
        assert_close(dq, expected, 1e-7);
    }

    #[rstest]
    #[case::all_keys([9, 9, 2, 4, 2, 8], options(false, 0, None))]
    #[case::ragged([40, 70, 1, 2, 1, 4], options(true, 31, None))]
    #[case::soft_cap([9, 9, 2, 4, 2, 8], AttentionOptions { soft_cap: Some(0.7), ..AttentionOptions::causal() })]
    #[case::padding([9, 12, 2, 2, 1, 4], packed([[0, 9, 9], [0, 9, 9]], [[0, 4, 12], [0, 12, 12]], options(false, 0, None)))]
    #[case::dropout([6, 7, 2, 4, 2, 4], dropped(0.4, [2, 4, 6, 7], options(false, 0, None)))]
    fn one_part_is_all_of_attention(#[case] shape: [usize; 6], #[case] options: AttentionOptions) {
        let (q, k, v) = qkv(shape);
        let bias = bias_of(shape);
        let [s_q, _, b, hq, _, d] = shape;
        let dout = constant::<4>([s_q, b, hq, d]);
        let y = biased_attention(
            q.clone(),
            k.clone(),
            v.clone(),
            bias.clone(),
            options.clone(),
        );
        let weight = dout.clone().reshape([s_q, b, hq * d]);
        let grads = (y.clone() * Tensor::from_inner(weight)).sum().backward();
        let part = biased_partial_attention(
            q.clone(),
            k.clone(),
            v.clone(),
            bias.clone(),
            options.clone(),
        );
        assert_close(part.out.clone().reshape([s_q, b, hq * d]), y.inner(), 1e-6);
        let inputs = [q, k, v];
        let (found, of_bias) =
            biased_partial_attention_gradients(inputs.clone(), bias.clone(), part, dout, options);
        for (input, found) in inputs.iter().zip(found) {
            assert_close(found, input.grad(&grads).unwrap(), 1e-5);
        }
        assert_close(of_bias, bias.grad(&grads).unwrap(), 1e-5);
    }

    #[test]
    fn parts_of_the_keys_merge_to_the_whole() {
        let shape = [5, 12, 2, 4, 2, 8];
        let (q, k, v) = qkv(shape);
        let bias = bias_of(shape);
        let all = AttentionOptions::default;
        let whole = biased_partial_attention(q.clone(), k.clone(), v.clone(), bias.clone(), all());
        let ranges = [(0, 3), (3, 4), (7, 5)];
        let parts = ranges.map(|(start, len)| {
            let [k, v] = [&k, &v].map(|x| x.clone().narrow(0, start, len));
            let bias = bias.clone().narrow(1, start, 4 + len);
            biased_partial_attention(q.clone(), k, v, bias, all())
        });
        let merged = parts.into_iter().reduce(PartialAttention::merge).unwrap();
        assert_close(merged.out, whole.out, 1e-6);
        assert_close(merged.lse, whole.lse, 1e-6);
    }

    fn with_bias(bias: [usize; 2]) {
        let (q, k, v) = qkv([3, 5, 1, 4, 2, 2]);
        biased_attention(q, k, v, normal(bias), AttentionOptions::default());
    }

    #[rstest]
    #[case(|| with_bias([4, 8]), "the bias [4, 8] is not [hq, s_q + s_k - 1], [4, 7]")]
    #[case(|| with_bias([2, 7]), "the bias [2, 7] is not [hq, s_q + s_k - 1], [4, 7]")]
    #[case(
        || {
            let (q, k, v) = qkv([3, 5, 1, 4, 2, 2]);
            biased_partial_attention(q, k, v, normal([1, 7]), AttentionOptions::default());
        },
        "the bias [1, 7] is not"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }

    #[test]
    fn without_a_bias_the_part_is_the_plain_one() {
        let (q, k, v) = qkv([4, 4, 1, 2, 2, 4]);
        let zeros = Tensor::zeros([2, 7], &q.device());
        let options = AttentionOptions::causal();
        let found =
            biased_partial_attention(q.clone(), k.clone(), v.clone(), zeros, options.clone());
        let expected = partial_attention(q, k, v, options);
        assert_close(found.out, expected.out, 1e-6);
        assert_close(found.lse, expected.lse, 1e-6);
    }
}
