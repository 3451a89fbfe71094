//! The steps on each backend, and the losses as a function of the logits.

use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{Int, Shape, Slice, Tensor};

use super::CrossEntropyOptions;

/// The steps of the loss on one part of the logits, by backend.
#[backend_extension(Cube: cfg(feature = "cuda"), Flex: cfg(feature = "flex"), Autodiff)]
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

    /// The losses among `rows`, as a differentiable function of the logits.
    ///
    /// # Shapes
    /// As in [`VocabParallelLoss::logit_gradient`]; the result has the shape of `labels`.
    fn losses(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;
}

/// [`VocabParallelLoss::losses`] without autodiff.
pub(super) fn losses_of<B: Backend>(rows: FloatTensor<B>, shape: Shape) -> FloatTensor<B> {
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

/// See [`VocabParallelLoss::losses`].
pub(super) fn losses(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    rows: Tensor<2>,
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let logits = logits.into_dispatch();
    let rows = rows.into_dispatch();
    let losses =
        <Dispatch as VocabParallelLoss>::losses(logits, labels.into_dispatch(), rows, options);
    Tensor::from_dispatch(losses)
}

/// The steps composed of tensor operations, for a backend without kernels for them.
#[cfg(feature = "flex")]
mod flex {
    use burn::backend::Flex;

    use super::*;
    use crate::cross_entropy::fallback;

    fn wrap<const D: usize>(x: FloatTensor<Flex>) -> Tensor<D> {
        Tensor::from_primitive::<Flex>(x)
    }

    fn ints(x: IntTensor<Flex>) -> Tensor<2, Int> {
        Tensor::from_primitive::<Flex>(x)
    }

    fn unwrap<const D: usize>(x: Tensor<D>) -> FloatTensor<Flex> {
        x.try_into_primitive::<Flex>()
            .expect("computed from Flex's tensors")
    }

    impl VocabParallelLoss for Flex {
        fn statistics(
            logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            unwrap(fallback::statistics(wrap(logits), ints(labels), options))
        }

        fn combined(
            statistics: FloatTensor<Self>,
            labels: IntTensor<Self>,
            columns: usize,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            unwrap(fallback::combined(
                wrap(statistics),
                ints(labels),
                columns,
                options,
            ))
        }

        fn logit_gradient(
            logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            rows: FloatTensor<Self>,
            grad: FloatTensor<Self>,
            options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            let rows = wrap(rows);
            let grad = wrap(grad);
            unwrap(fallback::logit_gradient(
                wrap(logits),
                ints(labels),
                rows,
                grad,
                options,
            ))
        }

        fn losses(
            _logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            rows: FloatTensor<Self>,
            _options: CrossEntropyOptions,
        ) -> FloatTensor<Self> {
            losses_of::<Self>(rows, labels.shape())
        }
    }
}

#[derive(Debug)]
struct LossesBackward;

/// Logits, labels, rows.
type Saved<B> = (
    FloatTensor<B>,
    IntTensor<B>,
    FloatTensor<B>,
    CrossEntropyOptions,
);

impl<B: VocabParallelLoss> Backward<B, 1> for LossesBackward {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (logits, labels, rows, options) = ops.state;
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            let grad = B::logit_gradient(logits, labels, rows, grad, options);
            grads.register::<B>(parent.id, grad);
        }
    }
}

impl<B: VocabParallelLoss, C: CheckpointStrategy> VocabParallelLoss for Autodiff<B, C> {
    fn statistics(
        _logits: FloatTensor<Self>,
        _labels: IntTensor<Self>,
        _options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        unreachable!("statistics are not differentiated")
    }

    fn combined(
        _statistics: FloatTensor<Self>,
        _labels: IntTensor<Self>,
        _columns: usize,
        _options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        unreachable!("statistics are not differentiated")
    }

    fn logit_gradient(
        _logits: FloatTensor<Self>,
        _labels: IntTensor<Self>,
        _rows: FloatTensor<Self>,
        _grad: FloatTensor<Self>,
        _options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        unreachable!("second-order gradients are not supported")
    }

    fn losses(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        rows: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        let (logits, node) = logits.into_parts();
        let rows = rows.into_primitive();
        match LossesBackward
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(op) => {
                // `B::losses` would take a second reference to the logits, and backward could not
                // overwrite them.
                let losses = losses_of::<B>(rows.clone(), labels.shape());
                op.finish((logits, labels, rows, options), losses)
            }
            OpsKind::UnTracked(op) => op.finish(losses_of::<B>(rows, labels.shape())),
        }
    }
}
