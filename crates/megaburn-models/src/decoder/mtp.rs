//! Multi-token prediction (MTP): blocks after a model's last layer that learn to predict tokens
//! further ahead.
//!
//! Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), <https://arxiv.org/abs/2412.19437>,
//! section 2.2; Megatron-LM `megatron/core/transformer/multi_token_prediction.py`.

use burn::{module::Module, tensor::Tensor};
use megaburn_parallel::{
    BatchContext, Norm, ParallelDropout, ReplicatedLinear, ReplicatedLinearConfig, Residual,
    Sharded,
};

use super::builder::ModelBuilder;
use crate::error::ModelError;

/// The layers that a block of multi-token prediction adds to a [`Block`](super::Block).
///
/// At depth `k`, the input of the block at position `i` is made from the output of depth `k - 1`
/// (depth 0 is the model itself) and the embedding of the token `k` positions ahead. The block is
/// followed by a norm of its own and the model's output projection, which predicts the token after
/// that one:
///
/// ```text
/// h'_k[i] = eh_proj([enorm(embedding(t[i + k])) | hnorm(h_(k-1)[i])])
/// h_k     = norm(block(h'_k)),   logits_k = head(h_k),   label t[i + k + 1]
/// ```
///
/// `h_0` is the output of the model's last norm. Embedding and output projection are shared with
/// the model. Learned positions are not added again, as `h` contains them already.
///
/// # Collective
/// The collectives of the embedding, the block and the output projection. `eh_proj` is replicated
/// on all ranks: with sequence parallelism each rank multiplies its own shard of the sequence,
/// otherwise all ranks compute the same product.
#[derive(Module, Sharded, Debug)]
pub struct Mtp {
    /// The norm of the token embeddings.
    pub enorm: Norm,
    /// The norm of the output of the depth before.
    pub hnorm: Norm,
    /// The projection of both norms' outputs, concatenated in this order, to the residual stream,
    /// `[2 hidden, hidden]`.
    pub eh_proj: ReplicatedLinear,
    /// The norm after the block.
    pub norm: Norm,
    /// Dropout on the token embeddings.
    dropout: ParallelDropout,
}

impl Mtp {
    /// Creates the layers of block `index`.
    pub(super) fn new(
        build: &ModelBuilder<'_>,
        index: usize,
        recompute: bool,
    ) -> Result<Self, ModelError> {
        let hidden = build.config.hidden;
        let eh_proj = ReplicatedLinearConfig::new(2 * hidden, hidden)
            .with_sequence_parallel(build.options.sequence_parallel)
            .with_initializer(build.initializer())
            .with_path(Some(format!("blocks.{index}.mtp.eh_proj")))
            .init(&build.groups.layers.tp, build.device)?;
        Ok(Self {
            enorm: build.norm(false),
            hnorm: build.norm(false),
            eh_proj,
            norm: build.norm(recompute),
            dropout: build.dropout(&format!("blocks.{index}.mtp"))?,
        })
    }

    /// The input of the block, from the token embeddings and the output of the depth before.
    pub(super) fn joined(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        batch: &BatchContext,
    ) -> Residual {
        let vectors = self.dropout.forward(vectors, batch.block);
        let both = vec![self.enorm.forward(vectors), self.hnorm.forward(before)];
        self.eh_proj.forward(Tensor::cat(both, 2)).into()
    }
}
