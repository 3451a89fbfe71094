//! Scaled, masked softmax over the scores of attention, as Megatron's fused kernels define it
//! (`megatron/core/fusions/fused_softmax.py`).

#[cfg(feature = "cuda")]
mod cube;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod op;
#[cfg(feature = "cuda")]
mod plan;
pub(crate) mod reference;

use burn::tensor::{Bool, Tensor};

/// Which scores do not count.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "made once a call and moved into it")]
pub enum SoftmaxMask {
    /// All count.
    None,
    /// Key `j` of query `i` does not count for `j > i`.
    Causal,
    /// Those where the mask is true: `[b or 1, h or 1, s_q, s_k]`, on a device without automatic
    /// differentiation.
    Masked(Tensor<4, Bool>),
}

/// Probabilities `softmax(scores * scale)` over the last dimension, with masked keys at 0.
///
/// Computed in f32 (f64 for f64), result in the dtype of `scores`. A row whose keys are all masked
/// is all 0. On GPUs a kernel each way, which reads a row once up to 8192 keys of f32, 16384 of
/// narrower scores, and overwrites scores, and backward their gradient, that nobody else holds.
///
/// # Shapes
/// - `scores`, result: `[b, h, s_q, s_k]`
///
/// # Panics
/// If a mask has another shape than `[b or 1, h or 1, s_q, s_k]`.
pub fn scale_mask_softmax(scores: Tensor<4>, mask: SoftmaxMask, scale: f64) -> Tensor<4> {
    if let SoftmaxMask::Masked(mask) = &mask {
        let (found, [b, h, s_q, s_k]) = (mask.dims(), scores.dims());
        assert!(
            (found[0] == b || found[0] == 1)
                && (found[1] == h || found[1] == 1)
                && found[2..] == [s_q, s_k],
            "scale_mask_softmax: the mask is {found:?}, not [{b} or 1, {h} or 1, {s_q}, {s_k}]"
        );
    }
    #[cfg(feature = "cuda")]
    if crate::is_on_gpu(&scores) && scores.dtype() != burn::tensor::DType::F64 {
        return op::on_gpu(scores, mask, scale);
    }
    reference::scale_mask_softmax(scores, mask, scale)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use rstest::rstest;

    use super::*;
    use crate::testing::{constant, device, normal, values};

    /// The definition in f64, row by row.
    fn by_hand(scores: &[f64], s_k: usize, scale: f64, masked: impl Fn(usize) -> bool) -> Vec<f64> {
        let mut out = vec![0.0; scores.len()];
        for (row, start) in (0..scores.len()).step_by(s_k).enumerate() {
            let kept = |j: &usize| !masked(row * s_k + j);
            let sum: f64 = (0..s_k).filter(kept).map(|j| (scores[start + j] * scale).exp()).sum();
            for j in (0..s_k).filter(kept) {
                out[start + j] = (scores[start + j] * scale).exp() / sum;
            }
        }
        out
    }

    #[rstest]
    #[case::square([2, 3, 4, 4])]
    #[case::ragged([1, 2, 5, 7])]
    fn probabilities_are_those_of_the_definition(
        #[case] shape: [usize; 4],
        #[values(1.0, 0.35)] scale: f64,
        #[values("none", "causal", "padding")] kind: &str,
    ) {
        let [_, _, s_q, s_k] = shape;
        let scores = normal(shape);
        // The padding mask hides the first key, and all keys of the second query.
        let hidden = move |i: usize| match kind {
            "none" => false,
            "causal" => i % s_k > i / s_k % s_q,
            _ => i.is_multiple_of(s_k) || i / s_k % s_q == 1,
        };
        let mask = match kind {
            "none" => SoftmaxMask::None,
            "causal" => SoftmaxMask::Causal,
            _ => {
                let bits: Vec<bool> = (0..s_q * s_k).map(hidden).collect();
                let data = TensorData::new(bits, [1, 1, s_q, s_k]);
                SoftmaxMask::Masked(Tensor::from_data(data, &device().inner()))
            }
        };
        let y = scale_mask_softmax(scores.clone(), mask, scale);
        let expected = by_hand(&values(scores.clone()), s_k, scale, hidden);
        let weight = constant(shape);
        let grads = (y.clone() * weight.clone()).sum().backward();
        for (a, b) in values(y).iter().zip(&expected) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        // dx = scale * p * (w - sum(p * w)), which is 0 wherever p is.
        let (w, dx) = (values(weight), values(scores.grad(&grads).unwrap()));
        for start in (0..w.len()).step_by(s_k) {
            let row = start..start + s_k;
            let dot: f64 = row.clone().map(|i| expected[i] * w[i]).sum();
            for i in row {
                assert!((dx[i] - scale * expected[i] * (w[i] - dot)).abs() < 2e-6);
            }
        }
    }

    #[test]
    fn half_precision_is_computed_in_f32() {
        // In f16 the scaled scores would overflow before the maximum is taken off.
        let scores = Tensor::<4>::full([1, 1, 2, 3], 60000.0, &device()).cast(DType::F16);
        let y = scale_mask_softmax(scores, SoftmaxMask::None, 8.0);
        assert_eq!(y.dtype(), DType::F16);
        assert!(values(y).iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-3));
    }
}
