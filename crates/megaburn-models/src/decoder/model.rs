use std::sync::{Arc, Mutex, PoisonError};

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::{Group, region::gather_from_last_dim};
use megaburn_kernels::{RopeTable, add_positions, sum_all};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ActivationOffload, CrossEntropy, Norm, ParallelDropout, PlanBuilder, PositionEmbedding,
    Recomputable, Residual, Sharded, VocabParallelEmbedding,
};
use megaburn_pipeline::StageLayers;

use super::{Block, DecoderConfig, Dropout, Recompute, Segment};
use crate::ModelError;

/// A decoder-only transformer.
///
/// Shapes: `S` sequence, `B` batch, `V` padded vocabulary, `n` tensor-parallel ranks. With sequence
/// parallelism the residual stream between the blocks has `S / n` positions.
///
/// On a rank of a pipeline, the decoder has the [stages](super::Stage) of this rank only, and the
/// parts of other ranks are `None`. Every parameter has the same path as in the full model.
///
/// # Collective
/// All members of the tensor-parallel group call every method together.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Token embedding: on the first stage, and on the last one if it is tied or used by
    /// multi-token prediction.
    pub embedding: Option<VocabParallelEmbedding>,
    /// Learned position embeddings; `None` for rotary positions.
    pub positions: Option<PositionEmbedding>,
    /// The blocks, followed by those of multi-token prediction; `None` for blocks of other ranks.
    pub blocks: Vec<Option<Block>>,
    /// The last norm.
    pub norm: Option<Norm>,
    /// The output projection; `None` if it is tied to the embedding.
    pub head: Option<VocabParallelEmbedding>,
    /// Dropout on the embeddings.
    pub(super) dropout: Option<ParallelDropout>,
    #[module(skip)]
    pub(super) parts: DecoderParts,
}

/// The parts of a decoder that are not parameters.
#[derive(Clone, Debug)]
pub(super) struct DecoderParts {
    pub(super) config: DecoderConfig,
    pub(super) stages: Vec<StageLayers>,
    pub(super) loss: CrossEntropy,
    /// Whether the loss is a fused linear cross-entropy.
    pub(super) fused_loss: bool,
    pub(super) recompute: Recompute,
    pub(super) offload: ActivationOffload,
    pub(super) group: Group,
    /// Whether the residual stream between the blocks is sharded along the sequence.
    pub(super) sequence_parallel: bool,
    /// The context-parallel ranks. In generation, prompts are split over them.
    pub(super) context: Group,
    /// The chunks of each sequence that this rank holds.
    pub(super) zigzag: Zigzag,
    /// The rotary table of the last device and sequence length, which all calls of a run share.
    pub(super) rope: Arc<Mutex<Option<(Device, Zigzag, RopeTable)>>>,
}

impl Decoder {
    /// Sets whether [`loss`](Self::loss) computes logits in chunks and recomputes them in backward
    /// ([`CrossEntropy::forward_linear`]), so that it never holds all of them. Off by default.
    #[must_use]
    pub fn with_fused_linear_cross_entropy(mut self, fused: bool) -> Self {
        self.parts.fused_loss = fused;
        self
    }

    /// Sets the dropout of a [stage](Self::stage) in [training](super::Stage::training).
    ///
    /// # Errors
    /// A probability outside `[0, 1)`.
    pub fn with_dropout(mut self, dropout: Dropout) -> Result<Self, ModelError> {
        let DecoderParts {
            group,
            sequence_parallel,
            zigzag,
            ..
        } = &self.parts;
        let blocks = self.blocks.into_iter().enumerate().map(|(index, block)| {
            let with = |block: Block| {
                block.with_dropout(dropout, index, group, (*sequence_parallel, *zigzag))
            };
            block.map(with).transpose()
        });
        self.blocks = blocks.collect::<Result<_, _>>()?;
        let layer = dropout.layer("embedding", group, *sequence_parallel)?;
        self.dropout = Some(layer.with_context(*zigzag));
        Ok(self)
    }

    /// Sets which activations backward recomputes.
    #[must_use]
    pub fn with_recompute(mut self, recompute: Recompute) -> Self {
        self.parts.recompute = recompute;
        for stage in &self.parts.stages {
            for Segment { blocks, again } in recompute.segments(stage.layers.len()) {
                for place in blocks.clone() {
                    let block = &mut self.blocks[stage.layers.start + place];
                    *block = block.take().map(|block| {
                        if again {
                            block
                                .into_checkpoint_member(place == blocks.start && !recompute.offload)
                        } else {
                            block.with_recompute(recompute)
                        }
                    });
                }
            }
        }
        self.norm = self.norm.map(|norm| norm.with_recompute(recompute.norm));
        self.with_mtp_recompute()
    }

    /// The logits of this rank's part of the vocabulary.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, V / n]`
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.logits(self.stage(0).from_tokens(tokens))
    }

    /// The sum of the next-token losses in nats; labels of -100 are ignored.
    ///
    /// # Shapes
    /// tokens and labels `[S, B]`; the sum is `[1]`, equal on every member
    pub fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<1> {
        self.loss_of(self.stage(0).from_tokens(tokens), labels)
    }

    /// [`loss`](Self::loss), computed from the residual stream after the last block.
    pub(super) fn loss_of(&self, stream: Residual, labels: Tensor<2, Int>) -> Tensor<1> {
        self.loss_from_normed(self.normed(stream), labels)
    }

    /// [`loss`](Self::loss), computed from the output of the last norm.
    pub(super) fn loss_from_normed(
        &self,
        normed: Recomputable<3>,
        labels: Tensor<2, Int>,
    ) -> Tensor<1> {
        let loss = &self.parts.loss;
        let losses = if self.parts.fused_loss {
            self.output().losses(normed, labels, loss)
        } else {
            loss.forward(self.output().logits(normed), labels)
        };
        sum_all(losses)
    }

    /// The logits of the full vocabulary, on every member.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, vocab]`
    pub fn full_logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.gathered(self.forward(tokens))
    }

    /// The sizes and parts of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.parts.config
    }

    /// The tensor-parallel group.
    pub fn group(&self) -> &Group {
        &self.parts.group
    }

    /// The token embeddings, plus position embeddings if the model has them. `positions` has one
    /// list per sequence, or one list for all.
    pub(super) fn embed(&self, tokens: Tensor<2, Int>, positions: &[Vec<usize>]) -> Tensor<3> {
        let x = self
            .embedding
            .as_ref()
            .expect("the first stage has the embedding")
            .forward(tokens);
        match &self.positions {
            Some(vectors) => {
                let vectors = vectors.forward_each(positions);
                if vectors.dims() == x.dims() {
                    x + vectors
                } else {
                    add_positions(x, vectors)
                }
            }
            None => x,
        }
    }

    pub(super) fn logits(&self, x: Residual) -> Tensor<3> {
        self.output().logits(self.normed(x))
    }

    pub(super) fn normed(&self, x: Residual) -> Recomputable<3> {
        x.normed(
            self.norm
                .as_ref()
                .expect("the last stage has the norm and the head"),
        )
        .0
    }

    /// The output projection.
    fn output(&self) -> &VocabParallelEmbedding {
        let output = self.head.as_ref().or(self.embedding.as_ref());
        output.expect("the last stage has the norm and the head")
    }

    pub(super) fn gathered(&self, logits: Tensor<3>) -> Tensor<3> {
        let logits = gather_from_last_dim(logits, &self.parts.group);
        logits.narrow(2, 0, self.parts.config.vocab)
    }

    /// The rotary table of the chunks of `zigzag` in sequences of `seq_len` tokens.
    pub(super) fn rope(
        &self,
        seq_len: usize,
        zigzag: Zigzag,
        device: &Device,
    ) -> Option<RopeTable> {
        let config = self.parts.config.rope()?;
        let mut cached = self
            .parts
            .rope
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((place, held, table)) = &*cached
            && (place, *held, table.num_positions() * zigzag.ranks()) == (device, zigzag, seq_len)
        {
            return Some(table.clone());
        }
        let table = config.init(zigzag.positions(seq_len), device);
        let table = table.expect("the configuration was validated");
        *cached = Some((device.clone(), zigzag, table.clone()));
        Some(table)
    }
}

impl Sharded for Decoder {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("embedding", &self.embedding);
        plan.child("positions", &self.positions);
        plan.children("blocks", &self.blocks);
        plan.child("norm", &self.norm);
        plan.child("head", &self.head);
    }
}
