//! RoPE under automatic differentiation.

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::{FusedOp, InputGrads, IntoPrimitive};

use super::table::RopeLayout;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RopeDirection {
    Forward,
    Inverse,
}

/// The rotation, with the best implementation per backend.
pub(crate) trait Rotate: IntoPrimitive {
    /// `x: [s, b, h, d]`; `cos, sin: [s, b, 1, r / 2]`, or `[s, 1, 1, r / 2]` for positions common
    /// to all sequences. The first `r` of `d` elements are rotated.
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        layout: RopeLayout,
        turn: RopeDirection,
    ) -> FloatTensor<Self>;
}

/// A rotation by the angles of a table.
#[derive(Debug)]
pub(super) struct Rope {
    pub(super) cos: Tensor<4>,
    pub(super) sin: Tensor<4>,
    pub(super) layout: RopeLayout,
}

impl<B: Rotate> FusedOp<B, 1> for Rope {
    /// The tuple has `cos`, `sin` and the layout.
    type Saved = (FloatTensor<B>, FloatTensor<B>, RopeLayout);

    fn forward(self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let Self { cos, sin, layout } = self;
        let (cos, sin) = (B::unwrap(cos), B::unwrap(sin));
        let y = B::rotate(x, cos.clone(), sin.clone(), layout, RopeDirection::Forward);
        (y, (cos, sin, layout))
    }

    fn backward((cos, sin, layout): Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        grads.register(0, B::rotate(dy, cos, sin, layout, RopeDirection::Inverse));
    }
}
