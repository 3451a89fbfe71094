use burn::{
    backend::{
        Backend, Dispatch, Flex, TensorMetadata,
        autodiff::{
            Autodiff,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    config::Config,
    prelude::{Bool, Int},
    tensor::Tensor,
};
use megaburn_collective::{
    Group,
    region::{max_over, reduce_from},
};

/// Configuration of a [`CrossEntropy`].
#[derive(Config, Debug)]
pub struct CrossEntropyConfig {
    /// Tokens of the vocabulary, without padding.
    pub vocab: usize,
    /// Share of the target's probability that is spread over the other tokens.
    #[config(default = 0.0)]
    pub label_smoothing: f64,
    /// Labels with this value take no part.
    #[config(default = -100)]
    pub ignore_index: i64,
}

impl CrossEntropyConfig {
    /// The loss over logits whose columns are split over `group`.
    pub fn init(&self, group: &Group) -> CrossEntropy {
        CrossEntropy { config: self.clone(), group: group.clone() }
    }
}

/// Cross entropy of vocabulary-parallel logits, without ever gathering them.
///
/// Columns of the padded vocabulary that belong to no token are left out of the softmax, so the
/// loss does not depend on the padding (Megatron-LM counts them). Label smoothing takes its mean
/// over the real vocabulary, with Megatron's factor `K / (K - 1)`.
///
/// Source: Megatron-LM `megatron/core/tensor_parallel/cross_entropy.py`.
/// # Collective
/// Forward: two small all-reduces (the rows' maxima; their sums). Backward: none.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    config: CrossEntropyConfig,
    group: Group,
}

impl CrossEntropy {
    /// The loss of each token, in nats; 0 where the label is ignored.
    ///
    /// # Shapes
    /// - logits: `[seq, batch, padded vocabulary / n]`, this rank's columns
    /// - labels: `[seq, batch]`, the same on every member
    /// - output: `[seq, batch]`, the same on every member
    pub fn forward(&self, logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<2> {
        let (loss, jacobian) = self.loss_and_jacobian(logits.clone().inner(), labels.inner());
        attach_gradient(logits, loss, jacobian)
    }

    /// The sum of the losses of all tokens that count, and how many those are.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward); the sum is `[1]`.
    pub fn forward_sum(&self, logits: Tensor<3>, labels: Tensor<2, Int>) -> (Tensor<1>, usize) {
        let counted = labels.clone().not_equal_elem(self.config.ignore_index);
        let count = counted.int().sum().into_scalar::<i64>() as usize;
        (self.forward(logits, labels).sum(), count)
    }

    fn loss_and_jacobian(
        &self,
        logits: Tensor<3>,
        labels: Tensor<2, Int>,
    ) -> (Tensor<2>, Tensor<3>) {
        let CrossEntropyConfig { vocab, label_smoothing, ignore_index } = self.config;
        let [seq, batch, columns] = logits.dims();
        let start = self.group.rank() * columns;
        let tokens = vocab.saturating_sub(start).min(columns);
        let device = logits.device();
        let column = Tensor::<1, Int>::arange(0..columns as i64, &device).reshape([1, 1, columns]);
        let padding = (tokens < columns).then(|| {
            column.clone().greater_equal_elem(tokens as i64).expand([seq, batch, columns])
        });
        let hide = |x: Tensor<3>, value: f64| match &padding {
            Some(padding) => x.mask_fill(padding.clone(), value),
            None => x,
        };

        let logits = hide(logits, f64::NEG_INFINITY);
        let max = max_over(logits.clone().max_dim(2), &self.group);
        let logits = logits - max;
        let local = (labels.clone() - start as i64).reshape([seq, batch, 1]);
        let target: Tensor<3, Bool> =
            local.expand([seq, batch, columns]).equal(column.expand([seq, batch, columns]));
        let exp = logits.clone().exp();
        let nothing = target.clone().bool_not();
        let mut sums =
            vec![exp.clone().sum_dim(2), logits.clone().mask_fill(nothing, 0.0).sum_dim(2)];
        let smoothing = label_smoothing * vocab as f64 / (vocab as f64 - 1.0).max(1.0);
        if smoothing > 0.0 {
            sums.push(hide(logits, 0.0).sum_dim(2));
        }
        let sums = reduce_from(Tensor::cat(sums, 2), &self.group);
        let sum = |index| sums.clone().narrow(2, index, 1);

        // loss = log(sum exp) - (1 - s) x_target - s mean(x)
        let mut loss = sum(0).log() - sum(1) * (1.0 - smoothing);
        let mut jacobian = exp / sum(0) - target.float() * (1.0 - smoothing);
        if smoothing > 0.0 {
            loss = loss - sum(2) * (smoothing / vocab as f64);
            jacobian = hide(jacobian - smoothing / vocab as f64, 0.0);
        }
        let ignored = labels.equal_elem(ignore_index);
        let loss = loss.reshape([seq, batch]).mask_fill(ignored.clone(), 0.0);
        let ignored = ignored.unsqueeze_dim::<3>(2).expand([seq, batch, columns]);
        (loss, jacobian.mask_fill(ignored, 0.0))
    }
}

/// `value` as a function of `x` whose derivative is known already: backward is one product.
///
/// # Shapes
/// `x` and `jacobian` `[s, b, v]`, `value` `[s, b]` with `d value[s, b] / d x[s, b, v] = jacobian[s, b, v]`.
fn attach_gradient(x: Tensor<3>, value: Tensor<2>, jacobian: Tensor<3>) -> Tensor<2> {
    if !x.device().is_autodiff() {
        return value;
    }
    let [x, value, jacobian] = [x.into_dispatch(), value.into_dispatch(), jacobian.into_dispatch()];
    Tensor::from_dispatch(<Dispatch as KnownGradient>::known_gradient(x, value, jacobian))
}

#[backend_extension(Flex, Autodiff)]
trait KnownGradient: Backend {
    fn known_gradient(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        jacobian: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl KnownGradient for Flex {
    fn known_gradient(
        _x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        _jacobian: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        value
    }
}

#[derive(Debug)]
struct KnownGradientBackward;

impl<B: KnownGradient> Backward<B, 1> for KnownGradientBackward {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let [seq, batch] = grad.shape().dims();
        let grad = B::float_reshape(grad, [seq, batch, 1].into());
        let [parent] = ops.parents;
        if let Some(parent) = parent {
            grads.register::<B>(parent.id, B::float_mul(ops.state, grad));
        }
    }
}

impl<B: KnownGradient, C: CheckpointStrategy> KnownGradient for Autodiff<B, C> {
    fn known_gradient(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        jacobian: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (value, jacobian) = (value.into_primitive(), jacobian.into_primitive());
        match KnownGradientBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let value = B::known_gradient(x, value, jacobian.clone());
                prep.finish(jacobian, value)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::known_gradient(x, value, jacobian)),
        }
    }
}
