//! Multi-token prediction (MTP): blocks after a model's last layer that learn to predict tokens
//! further ahead.
//!
//! Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), <https://arxiv.org/abs/2412.19437>,
//! section 2.2; Megatron-LM `megatron/core/transformer/multi_token_prediction.py`.

use burn::{module::Module, nn::Initializer, prelude::Int, tensor::Tensor};
use megaburn_kernels::RopeTable;
use megaburn_parallel::{
    BatchContext, Norm, ParallelDropout, PlanBuilder, Recomputable, ReplicatedLinear,
    ReplicatedLinearConfig, Residual, SelectiveSave, Sharded, recomputed,
};

use super::{Block, Decoder, MtpTargets, StageLosses, init::ModelBuilder};
use crate::ModelError;

/// The layers that a block of multi-token prediction adds to a [`Block`].
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
#[derive(Module, Debug)]
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
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            })
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
    fn joined(&self, vectors: Tensor<3>, before: Tensor<3>, batch: &BatchContext) -> Residual {
        let vectors = self.dropout.forward(vectors, batch.block);
        let both = vec![self.enorm.forward(vectors), self.hnorm.forward(before)];
        self.eh_proj.forward(Tensor::cat(both, 2)).into()
    }
}

impl Sharded for Mtp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("enorm", &self.enorm);
        plan.child("hnorm", &self.hnorm);
        plan.child("eh_proj", &self.eh_proj);
        plan.child("norm", &self.norm);
    }
}

impl Block {
    /// The output of a depth, from the embeddings of its tokens and the output of the depth before.
    ///
    /// # Shapes
    /// `[S, B, H]` all (with sequence parallelism `[S / n, B, H]`)
    fn predict(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        rope: Option<&RopeTable>,
        batch: &BatchContext,
    ) -> Recomputable<3> {
        let mtp = self.mtp.as_ref().expect("the block is an MTP block");
        let x = self.forward(mtp.joined(vectors, before, batch), rope, batch);
        x.normed(&mtp.norm)
    }

    /// [`Self::predict`] as a recomputed function, which saves only its two inputs.
    fn predict_recomputed(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        rope: Option<RopeTable>,
        batch: BatchContext,
    ) -> Recomputable<3> {
        let inputs = [vectors.into(), before.into()];
        let [x] = recomputed(self, inputs, move |block, [vectors, before]| {
            let x = block.predict(vectors, before, rope.as_ref(), &batch);
            [x.into_tensor()]
        });
        x.into()
    }
}

impl Decoder {
    /// The [`loss`](Self::loss) after the last stage, and the losses of the depths of multi-token
    /// prediction. `ahead` has the targets of all depths, or is empty if these losses are not
    /// needed.
    ///
    /// # Shapes
    /// labels, and the tensors of each depth, `[S, B]`; sums are `[1]`, equal on every member
    ///
    /// # Panics
    /// If `ahead` is not empty and its length differs from the number of depths.
    pub fn losses(
        &self,
        x: Residual,
        labels: Tensor<2, Int>,
        ahead: &[MtpTargets],
        batch: &BatchContext,
    ) -> StageLosses {
        let mut before = self.normed(x);
        let main = self.loss_of(before.clone(), labels);
        // A rank without the last stage has none of these blocks.
        let blocks: Vec<&Block> = self.blocks[self.config().layers..]
            .iter()
            .flatten()
            .collect();
        let depths = blocks.len();
        assert!(
            ahead.is_empty() || ahead.len() == depths,
            "the model has {depths} MTP depths, but {} are given",
            ahead.len()
        );
        let recompute = self.parts.options.recompute;
        let num_blocks = self.stages().last().map_or(0, |stage| stage.layers.len());
        let mut mtp = Vec::with_capacity(ahead.len());
        for (depth, (block, targets)) in blocks.into_iter().zip(ahead).enumerate() {
            let batch = BatchContext {
                counted: targets.counted.clone(),
                ..batch.clone()
            };
            let last = before.into_tensor();
            let rope = self.rope(self.num_tokens(&last), &batch, &last.device().inner());
            let vectors = self.embed_tokens(targets.tokens.clone());
            before = if recompute.recomputes_mtp(num_blocks + depth) {
                let saved = recompute.selective_save(&vectors.device());
                let batch = BatchContext {
                    saved_attention: saved.clone(),
                    ..batch
                };
                let x = block.predict_recomputed(vectors, last, rope, batch);
                saved.iter().for_each(SelectiveSave::end_forward);
                x
            } else {
                block.predict(vectors, last, rope.as_ref(), &batch)
            };
            mtp.push(self.loss_of(before.clone(), targets.labels.clone()));
        }
        StageLosses { main, mtp }
    }
}
