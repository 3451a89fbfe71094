//! The softmax of scores on a GPU, under automatic differentiation.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::Tensor;
use megaburn_autograd::backend_ops::cast;
use megaburn_autograd::{FusedOp, InputGrads, IntoPrimitive, fused_on_gpu};

use super::launch::{softmax, softmax_gradient};
use super::options::SoftmaxMask;

/// `softmax(scores * scale)` of scores `[b, h, s_q, s_k]`.
#[derive(Debug)]
struct Softmax {
    mask: SoftmaxMask,
    scale: f64,
}

/// See [`scale_mask_softmax`](crate::scale_mask_softmax).
pub(super) fn on_gpu(scores: Tensor<4>, mask: SoftmaxMask, scale: f64) -> Tensor<4> {
    fused_on_gpu(Softmax { mask, scale }, [scores.into_dispatch()])
}

impl FusedOp<Cube, 1> for Softmax {
    /// The result, the scale, and whether the mask is causal.
    type Saved = (FloatTensor<Cube>, f64, bool);

    fn forward(self, [scores]: [FloatTensor<Cube>; 1]) -> (FloatTensor<Cube>, Self::Saved) {
        let Self { mask, scale } = self;
        let causal = matches!(mask, SoftmaxMask::Causal);
        let mask: Option<BoolTensor<Cube>> = match mask {
            SoftmaxMask::Masked(mask) => Some(Cube::unwrap_bool(mask.inner())),
            SoftmaxMask::None | SoftmaxMask::Causal => None,
        };
        let p = softmax(scores, mask, scale, causal);
        (p.clone(), (p, scale, causal))
    }

    fn backward(
        (p, scale, causal): Self::Saved,
        dy: FloatTensor<Cube>,
        mut grads: InputGrads<'_, Cube>,
    ) {
        let dp = cast::<Cube>(dy, p.dtype().into());
        grads.register(0, softmax_gradient(p, dp, scale, causal));
    }
}
