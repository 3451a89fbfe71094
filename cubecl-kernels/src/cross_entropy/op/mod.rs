//! The steps on each backend, and the losses as a function of the logits.

mod fused_linear;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Int, Shape, Slice, Tensor};
use megaburn_autograd::{FusedOp, InputGrads, IntoPrimitive, fused};

use super::options::CrossEntropyOptions;
pub(super) use fused_linear::{LinearLossOptions, LinearLosses};

/// The steps of the loss on one part of the logits, by backend.
#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray")
)]
pub(crate) trait VocabParallelLoss: Backend {
    /// The statistics of each row over this part's tokens: the maximum `m`, the sum of
    /// `exp(x - m)`, the target's `x` (0 if it is in another part) and the sum of `x - m` (any
    /// value without smoothing). Statistics of ignored rows are arbitrary but finite.
    ///
    /// # Shapes
    /// `logits: [s, b, columns]`, `labels: [s, b]` to `[1, 4, s * b]` in the compute dtype
    fn statistics(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;

    /// Combines the statistics of all parts: for each row the maximum `m`, the sum of `exp(x - m)`
    /// and the loss. The sum is NaN where the label is no token, and with it the loss and the
    /// gradient.
    ///
    /// # Shapes
    /// `statistics: [parts, 4, s * b]`, `labels: [s, b]` to `[3, s * b]`
    fn combined(
        statistics: FloatTensor<Self>,
        labels: IntTensor<Self>,
        columns: usize,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;

    /// The gradient of this part's logits, in place where possible.
    ///
    /// # Shapes
    /// `logits: [s, b, columns]`, `labels, grad: [s, b]`, `rows` as returned by
    /// [`VocabParallelLoss::combined`]
    fn logit_gradient(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;
}

/// The losses among `rows`, in the shape of the labels.
fn losses_of<B: Backend>(rows: FloatTensor<B>, shape: Shape) -> FloatTensor<B> {
    let row = B::float_slice(rows, &[Slice::from(2..3), Slice::full()]);
    B::float_reshape(row, shape)
}

/// See [`VocabParallelLoss::statistics`].
pub(super) fn statistics(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    options: CrossEntropyOptions,
) -> Tensor<3> {
    let logits = logits.into_dispatch();
    let labels = labels.into_dispatch();
    Tensor::from_dispatch(<Dispatch as VocabParallelLoss>::statistics(
        logits, labels, options,
    ))
}

/// See [`VocabParallelLoss::combined`].
pub(super) fn combined(
    statistics: Tensor<3>,
    labels: Tensor<2, Int>,
    columns: usize,
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let statistics = statistics.into_dispatch();
    let labels = labels.into_dispatch();
    Tensor::from_dispatch(<Dispatch as VocabParallelLoss>::combined(
        statistics, labels, columns, options,
    ))
}

/// The losses among `rows`, as a differentiable function of the logits.
///
/// # Shapes
/// As in [`VocabParallelLoss::logit_gradient`]; the result has the shape of `labels`.
pub(super) fn losses(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    rows: Tensor<2>,
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let losses = Losses {
        labels,
        rows,
        options,
    };
    fused(losses, [logits.into_dispatch()])
}

#[derive(Debug)]
struct Losses {
    labels: Tensor<2, Int>,
    rows: Tensor<2>,
    options: CrossEntropyOptions,
}

impl<B: VocabParallelLoss + IntoPrimitive> FusedOp<B, 1> for Losses {
    /// Logits, labels, rows and options.
    type Saved = (
        FloatTensor<B>,
        IntTensor<B>,
        FloatTensor<B>,
        CrossEntropyOptions,
    );

    fn forward(self, [logits]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let labels = B::unwrap_int(self.labels);
        let rows = B::unwrap(self.rows);
        let losses = losses_of::<B>(rows.clone(), labels.shape());
        // The logits have no second owner, so that backward can overwrite them.
        (losses, (logits, labels, rows, self.options))
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let (logits, labels, rows, options) = saved;
        grads.register(0, B::logit_gradient(logits, labels, rows, dy, options));
    }
}
