use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_mesh::{Axis, ShardSpec, pad_vocab};

use crate::{
    error::ParallelError,
    shards::{PlanBuilder, Sharded},
    unsaved_shard::unsaved_shard,
};

/// Configuration of a [`VocabParallelBias`].
#[derive(Config, Debug)]
pub struct VocabParallelBiasConfig {
    /// Tokens of the vocabulary, without padding.
    pub n_embedding: usize,
    /// The vocabulary is padded to a multiple of this times the group's size, as in
    /// [`VocabParallelEmbeddingConfig`](crate::VocabParallelEmbeddingConfig).
    #[config(default = 128)]
    pub pad_multiple: usize,
}

impl VocabParallelBiasConfig {
    /// Builds this rank's part of the bias, with zeros.
    ///
    /// # Errors
    /// The padded vocabulary is not divisible by the ranks.
    /// # Collective
    /// Nothing is sent.
    pub fn init(&self, group: &Group, device: &Device) -> Result<VocabParallelBias, ParallelError> {
        let ranks = group.size();
        let padded = pad_vocab(self.n_embedding, self.pad_multiple, ranks);
        let shape = [self.n_embedding];
        let spec = ShardSpec::split_padded(&shape, 0, padded, Axis::Tp, group.rank(), ranks)
            .map_err(|source| ParallelError::Shard {
                name: "bias of the vocabulary".into(),
                source,
            })?;
        let bias = Initializer::Zeros.init([spec.local_len], device);
        Ok(VocabParallelBias {
            bias: unsaved_shard(bias, "bias of the vocabulary".into(), &spec, group),
            spec,
            main_grad: MainGrad::default(),
        })
    }
}

/// A bias for each token of the vocabulary, which is added to logits and split as they are over a
/// group. Elements of the padding are zero and are not part of the model.
///
/// Source: Devlin et al. (2018), BERT; Megatron-LM `megatron/core/models/bert/bert_model.py`.
/// # Collective
/// None, forward and backward.
#[derive(Module, Debug)]
pub struct VocabParallelBias {
    /// This rank's elements, `[padded vocabulary / n]`.
    pub bias: Param<Tensor<1>>,
    #[module(skip)]
    spec: ShardSpec,
    #[module(skip)]
    main_grad: MainGrad,
}

impl VocabParallelBias {
    /// The bias of this rank's logits, and where its gradient is accumulated.
    pub(crate) fn parts(&self) -> (Tensor<1>, MainGrad) {
        (self.bias.val(), self.main_grad.clone())
    }
}

impl Sharded for VocabParallelBias {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.vector("bias", &self.spec, Some(self.main_grad.clone()));
    }
}
