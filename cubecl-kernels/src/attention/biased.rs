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
/// for f64).
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
