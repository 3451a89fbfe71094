//! Scaled, masked softmax over attention scores, as Megatron's fused kernels define it
//! (`megatron/core/fusions/fused_softmax.py`).

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod op;
mod options;
pub(crate) mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

pub use options::SoftmaxMask;

/// Computes probabilities `softmax(scores * scale)` over the last dimension, with masked keys at 0.
///
/// Computed in f32 (f64 for f64); the result has the dtype of `scores`. A row whose keys are all
/// masked is all 0. On GPUs there is one kernel per direction, which reads a row once if it has at
/// most 8192 keys in f32, or 16384 in narrower dtypes. It works in place if no other tensor shares
/// the scores, or in the backward pass their gradient.
///
/// # Shapes
/// - `scores`, result: `[b, h, s_q, s_k]`
///
/// # Panics
/// If a mask has another shape than `[b or 1, h or 1, s_q, s_k]`, or the scale is not finite.
pub fn scale_mask_softmax(scores: Tensor<4>, mask: SoftmaxMask, scale: f64) -> Tensor<4> {
    let name = "scale_mask_softmax";
    arg_check::check(name, [float("scores", &scores)]);
    assert!(
        scale.is_finite(),
        "{name}: scale {scale} is not a finite number"
    );
    if let SoftmaxMask::Masked(mask) = &mask {
        arg_check::check(
            name,
            [float("scores", &scores), arg_check::bool("the mask", mask)],
        );
        let found = mask.dims();
        let [b, h, s_q, s_k] = scores.dims();
        assert!(
            (found[0] == b || found[0] == 1)
                && (found[1] == h || found[1] == 1)
                && found[2..] == [s_q, s_k],
            "{name}: the mask is {found:?}, not [{b} or 1, {h} or 1, {s_q}, {s_k}]"
        );
    }
    if scores.shape().num_elements() == 0 {
        return scores;
    }
    #[cfg(feature = "cuda")]
    if crate::gpu::is_on_gpu(&scores) && scores.dtype() != burn::tensor::DType::F64 {
        return op::on_gpu(scores, mask, scale);
    }
    reference::scale_mask_softmax(scores, mask, scale)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use megaburn_autograd::testing::{
        assert_close, assert_refused, constant, device, leaf, normal, quantized, values,
    };
    use rstest::rstest;

    use super::*;

    /// The definition in f64, row by row.
    fn by_hand(scores: &[f64], s_k: usize, scale: f64, masked: impl Fn(usize) -> bool) -> Vec<f64> {
        let mut out = vec![0.0; scores.len()];
        for (row, start) in (0..scores.len()).step_by(s_k).enumerate() {
            let kept = |j: &usize| !masked(row * s_k + j);
            let sum: f64 = (0..s_k)
                .filter(kept)
                .map(|j| (scores[start + j] * scale).exp())
                .sum();
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
        let w = values(weight);
        let dx = values(scores.grad(&grads).unwrap());
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
        // In f16 the scaled scores would overflow before the maximum is subtracted.
        let scores = Tensor::<4>::full([1, 1, 2, 3], 60000.0, &device()).cast(DType::F16);
        let y = scale_mask_softmax(scores, SoftmaxMask::None, 8.0);
        assert_eq!(y.dtype(), DType::F16);
        assert!(values(y).iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-3));
    }

    fn mask(shape: [usize; 4]) -> SoftmaxMask {
        // (The mask may also be on an autodiff device.)
        let bits = (0..shape.iter().product()).map(|i| i % 3 == 1).collect();
        let data = TensorData::new::<bool, _>(bits, shape);
        SoftmaxMask::Masked(Tensor::from_data(data, &device()))
    }

    #[test]
    fn views_give_what_their_copies_give() {
        let scores = normal([4, 5, 2, 9]);
        let view = |x: Tensor<4>| x.permute([2, 0, 1, 3]).narrow(3, 1, 7);
        let copy = leaf(Tensor::from_data(
            view(scores.clone()).into_data(),
            &device(),
        ));
        let weight = constant([2, 4, 5, 7]);
        let probabilities = |scores: Tensor<4>| {
            // The mask is a view, too.
            let SoftmaxMask::Masked(mask) = mask([7, 5, 1, 1]) else {
                unreachable!()
            };
            let mask = SoftmaxMask::Masked(mask.permute([2, 3, 1, 0]));
            scale_mask_softmax(scores, mask, 0.7)
        };
        let [y, expected] = [view(scores.clone()), copy.clone()].map(probabilities);
        assert_close(y.clone(), expected.clone(), 1e-6);
        let grads = [y, expected].map(|y| (y * weight.clone()).sum().backward());
        let grad = view(scores.grad(&grads[0]).unwrap());
        assert_close(grad, copy.grad(&grads[1]).unwrap(), 1e-6);
    }

    #[rstest]
    #[case([0, 2, 3, 3])]
    #[case([1, 2, 0, 3])]
    #[case([1, 2, 3, 0])]
    fn nothing_gives_nothing(#[case] shape: [usize; 4]) {
        let scores = normal(shape);
        for masked in [SoftmaxMask::None, SoftmaxMask::Causal, mask(shape)] {
            let y = scale_mask_softmax(scores.clone(), masked, 1.0);
            assert_eq!(y.dims(), shape);
            assert_eq!(scores.grad(&y.sum().backward()).unwrap().dims(), shape);
        }
    }

    fn of(shape: [usize; 4], mask: SoftmaxMask, scale: f64) {
        scale_mask_softmax(normal(shape), mask, scale);
    }

    #[rstest]
    #[case::queries(|| of([2, 3, 4, 5], mask([1, 1, 1, 5]), 1.0), "scale_mask_softmax: the mask is [1, 1, 1, 5], not [2 or 1, 3 or 1, 4, 5]")]
    #[case::swapped(|| of([2, 3, 4, 5], mask([1, 1, 5, 4]), 1.0), "the mask is [1, 1, 5, 4]")]
    #[case::heads(|| of([2, 3, 4, 5], mask([2, 2, 4, 5]), 1.0), "the mask is [2, 2, 4, 5]")]
    #[case::nan(|| of([2, 3, 4, 5], SoftmaxMask::None, f64::NAN), "scale NaN is not a finite number")]
    #[case::infinite(|| of([2, 3, 4, 5], SoftmaxMask::Causal, f64::INFINITY), "scale inf is not")]
    #[case::dtype(
        || drop(scale_mask_softmax(quantized([1, 1, 4, 4]), SoftmaxMask::None, 1.0)),
        "scale_mask_softmax: scores is qfloat"
    )]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
