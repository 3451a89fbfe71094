use burn::{module::Module, prelude::Int, tensor::Tensor};
use megaburn_collective::{Group, region::gather_from_sequence_to_replicas};
use megaburn_kernels::sum_all;
use megaburn_parallel::{
    CrossEntropy, CrossEntropyConfig, ReplicatedLinear, ReplicatedLinearConfig, Sharded,
};

use super::builder::ModelBuilder;
use crate::error::ModelError;

/// The head of an encoder that classifies a row by its first token, as one of two classes: BERT's
/// pooler and its next-sentence head, `classifier(tanh(pooler(x_0)))`.
///
/// Source: Devlin et al., "BERT" (2018), <https://arxiv.org/abs/1810.04805>; Transformers
/// `models/bert/modeling_bert.py`, `BertPooler`; Megatron-LM
/// `megatron/core/models/bert/pooler.py`.
///
/// # Collective
/// With sequence parallelism, forward: one all-gather of one token of each member's shard. All
/// members compute the same classes, so backward sends nothing.
#[derive(Module, Sharded, Debug)]
pub struct BinaryHead {
    /// The pooler, `[hidden, hidden]`, with a bias.
    pub pooler: ReplicatedLinear,
    /// The classifier, `[hidden, 2]`, with a bias.
    pub classifier: ReplicatedLinear,
    #[module(skip)]
    loss: CrossEntropy,
    #[module(skip)]
    group: Group,
    #[module(skip)]
    sequence_parallel: bool,
}

/// The number of classes.
const CLASSES: usize = 2;

impl BinaryHead {
    /// The head, identical on every rank.
    pub(super) fn new(build: &ModelBuilder<'_>) -> Result<Self, ModelError> {
        let hidden = build.config.hidden;
        let group = &build.groups.layers.tp;
        let layer = |field: &str, outputs: usize| {
            ReplicatedLinearConfig::new(hidden, outputs)
                .with_bias(true)
                .with_initializer(build.initializer())
                .with_name(format!("binary_head.{field}"))
                .init(group, build.device)
        };
        Ok(Self {
            pooler: layer("pooler", hidden)?,
            classifier: layer("classifier", CLASSES)?,
            loss: CrossEntropyConfig::new(CLASSES).init(&Group::single(0))?,
            group: group.clone(),
            sequence_parallel: build.options.sequence_parallel,
        })
    }

    /// The logits of the two classes, on every member.
    ///
    /// # Shapes
    /// `[S, B, H]` (with sequence parallelism `[S / n, B, H]`) to `[1, B, 2]`
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let first = x.narrow(0, 0, 1);
        let first = if self.sequence_parallel {
            gather_from_sequence_to_replicas(first, &self.group).narrow(0, 0, 1)
        } else {
            first
        };
        self.classifier.forward(self.pooler.forward(first).tanh())
    }

    /// The sum of the losses of all rows, in nats.
    ///
    /// # Shapes
    /// as [`forward`](Self::forward); labels `[1, B]`; the sum is `[1]`, equal on every member
    pub(super) fn loss(&self, x: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
        sum_all(self.loss.forward(self.forward(x), labels))
    }
}
