use burn::{module::Module, tensor::Tensor};
use megaburn_parallel::{
    Activation, Norm, Recomputable, ReplicatedLinear, ReplicatedLinearConfig, Sharded,
    VocabParallelBias, VocabParallelBiasConfig,
};

use super::builder::ModelBuilder;
use crate::error::ModelError;

/// The layers of a masked language model between its last block and its output projection:
/// `norm(activation(dense(x)))`, and a bias for each token of the vocabulary, which is added to the
/// logits.
///
/// Source: Devlin et al., "BERT" (2018), <https://arxiv.org/abs/1810.04805>; Transformers
/// `models/bert/modeling_bert.py`, `BertLMPredictionHead`; Megatron-LM
/// `megatron/core/models/bert/bert_lm_head.py`.
///
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of the gradient of each
/// parameter except the bias of the vocabulary.
#[derive(Module, Sharded, Debug)]
pub struct MaskedHead {
    /// The matrix, `[hidden, hidden]`, and its bias, replicated on all ranks.
    pub dense: ReplicatedLinear,
    /// The norm of the activated features.
    pub norm: Norm,
    /// The bias of the logits, split as the vocabulary is.
    pub vocab: VocabParallelBias,
    #[module(skip)]
    activation: Activation,
}

impl MaskedHead {
    /// The head of this rank.
    pub(super) fn new(build: &ModelBuilder<'_>) -> Result<Self, ModelError> {
        let hidden = build.config.hidden;
        let tp = &build.groups.layers.tp;
        let dense = ReplicatedLinearConfig::new(hidden, hidden)
            .with_bias(true)
            .with_sequence_parallel(build.options.sequence_parallel)
            .with_initializer(build.initializer())
            .with_name("masked_head.dense")
            .init(tp, build.device)?;
        Ok(Self {
            dense,
            norm: build.norm(false),
            vocab: VocabParallelBiasConfig::new(build.config.vocab).init(tp, build.device)?,
            activation: build.config.activation,
        })
    }

    /// The input of the output projection.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`)
    pub(super) fn forward(&self, x: Recomputable<3>) -> Tensor<3> {
        let x = self.activation.forward(self.dense.forward(x));
        self.norm.forward(x)
    }
}
