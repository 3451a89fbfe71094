//! Multi-token prediction (MTP): blocks after a model's last layer that learn to predict tokens
//! further ahead.
//!
//! Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), <https://arxiv.org/abs/2412.19437>,
//! section 2.2; Megatron-LM `megatron/core/transformer/multi_token_prediction.py`.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ExpertGroups, Norm, ParallelDropout, PlanBuilder, Recomputable, ReplicatedLinear,
    ReplicatedLinearConfig, Residual, Sharded, TokenContext, recomputed,
};

use super::{Block, Decoder, Dropout, MtpTargets, Recompute, Stage, StageLosses, block::norm};
use crate::{DecoderConfig, ModelError};

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
    dropout: Option<ParallelDropout>,
}

impl Mtp {
    /// Creates the layers of block `index`.
    pub(super) fn new(
        config: &DecoderConfig,
        index: usize,
        groups: &ExpertGroups,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let norm = || norm(config, &groups.tp, sequence_parallel, device);
        let eh_proj = ReplicatedLinearConfig::new(2 * config.hidden, config.hidden)
            .with_sequence_parallel(sequence_parallel)
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            })
            .with_path(Some(format!("blocks.{index}.mtp.eh_proj")))
            .init(&groups.tp, device)?;
        Ok(Self {
            enorm: norm(),
            hnorm: norm(),
            eh_proj,
            norm: norm(),
            dropout: None,
        })
    }

    /// Sets the dropout on the token embeddings, for the block with number `index`.
    pub(super) fn with_dropout(
        self,
        dropout: Dropout,
        index: usize,
        group: &Group,
        (sequence_parallel, zigzag): (bool, Zigzag),
    ) -> Result<Self, ModelError> {
        let layer = dropout.layer(&format!("blocks.{index}.mtp"), group, sequence_parallel)?;
        Ok(Self {
            dropout: Some(layer.with_context(zigzag)),
            ..self
        })
    }

    /// Sets the context-parallel chunks that this rank holds.
    pub(super) fn with_context(self, zigzag: Zigzag) -> Self {
        Self {
            dropout: self.dropout.map(|dropout| dropout.with_context(zigzag)),
            ..self
        }
    }

    /// Sets whether backward recomputes the output of the last norm.
    pub(super) fn with_recompute(self, recompute: Recompute) -> Self {
        Self {
            norm: self.norm.with_recompute(recompute.norm),
            ..self
        }
    }

    /// The input of the block, from the token embeddings and the output of the depth before.
    fn joined(&self, vectors: Tensor<3>, before: Tensor<3>, context: &TokenContext) -> Residual {
        let vectors = match (&self.dropout, &context.block) {
            (Some(dropout), Some(block)) => dropout.forward(vectors, block),
            _ => vectors,
        };
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
        context: &TokenContext,
    ) -> Recomputable<3> {
        let mtp = self.mtp.as_ref().expect("the block is an MTP block");
        let x = self.forward(mtp.joined(vectors, before, context), context);
        x.normed(&mtp.norm).0
    }

    /// [`Self::predict`] as a recomputed function, which saves only its two inputs.
    fn predict_again(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        context: TokenContext,
    ) -> Recomputable<3> {
        let inputs = [vectors.into(), before.into()];
        let [x] = recomputed(self, inputs, move |block, [vectors, before]| {
            [block.predict(vectors, before, &context).into_tensor()]
        });
        x.into()
    }
}

impl Stage<'_> {
    /// The [`loss`](Self::loss) after the last stage, and the losses of the depths of multi-token
    /// prediction. `ahead` has the targets of all depths, or is empty if these losses are not
    /// needed.
    ///
    /// # Shapes
    /// labels, and the tensors of each depth, `[S, B]`; sums are `[1]`, equal on every member
    ///
    /// # Panics
    /// If `ahead` is not empty and its length differs from the number of depths.
    pub fn losses(&self, x: Residual, labels: Tensor<2, Int>, ahead: &[MtpTargets]) -> StageLosses {
        let model = self.model;
        let mut before = model.normed(x);
        let main = model.loss_from_normed(before.clone(), labels);
        let mtp_depths = model.mtp_blocks().count();
        assert!(
            ahead.is_empty() || ahead.len() == mtp_depths,
            "the model has {mtp_depths} MTP depths, but {} are given",
            ahead.len()
        );
        let mut mtp = Vec::with_capacity(ahead.len());
        for (
            (block, again),
            MtpTargets {
                tokens,
                labels,
                counted,
            },
        ) in model.mtp_blocks().zip(ahead)
        {
            let len = tokens.dims()[0] * self.zigzag().ranks();
            let context = self.context(len, counted.clone(), &tokens.device());
            let embedding = model
                .embedding
                .as_ref()
                .expect("a stage with a loss has the embedding");
            let vectors = embedding.forward(tokens.clone());
            before = if again {
                model.parts.recompute.with_selective_save(|| {
                    block.predict_again(vectors, before.into_tensor(), context)
                })
            } else {
                block.predict(vectors, before.into_tensor(), &context)
            };
            mtp.push(model.loss_from_normed(before.clone(), labels.clone()));
        }
        StageLosses { main, mtp }
    }
}

impl Decoder {
    /// The blocks of multi-token prediction if this rank has the last stage, and whether backward
    /// recomputes each.
    fn mtp_blocks(&self) -> impl Iterator<Item = (&Block, bool)> {
        let layers = self.config().layers;
        let before = self.blocks_of_last_stage();
        let blocks = self.blocks[layers..].iter().flatten().enumerate();
        blocks.map(move |(depth, block)| (block, self.parts.recompute.is_behind(before + depth)))
    }

    /// Sets which activations of the blocks of multi-token prediction backward recomputes.
    pub(super) fn with_mtp_recompute(mut self) -> Self {
        let layers = self.config().layers;
        let before = self.blocks_of_last_stage();
        let recompute = self.parts.recompute;
        for (depth, place) in self.blocks[layers..].iter_mut().enumerate() {
            *place = place.take().map(|block| {
                if recompute.is_behind(before + depth) {
                    block.into_checkpoint_member(false)
                } else {
                    block.with_recompute(recompute)
                }
            });
        }
        self
    }

    fn blocks_of_last_stage(&self) -> usize {
        self.parts
            .stages
            .last()
            .map_or(0, |stage| stage.layers.len())
    }
}
