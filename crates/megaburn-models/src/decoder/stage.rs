use std::sync::Arc;

use burn::{
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ActivationOffload, ContextParallel, PackedDocuments, Residual, TokenBlock, TokenContext,
    checkpoint_residual, offload_residual,
};
use megaburn_pipeline::StageLayers;

use super::{Block, Decoder, Segment, model::DecoderParts};

/// One stage of a pipeline. It starts from the tokens or the output of the stage before, and ends
/// with the residual stream after its last block, or with the loss.
///
/// Shapes: as in [`Decoder`]; with context parallelism `S` is this rank's part of the sequence.
///
/// # Collective
/// All members of the tensor-parallel group, and the context-parallel ranks; nothing is sent to
/// another stage.
#[derive(Clone, Debug)]
pub struct Stage<'a> {
    pub(super) model: &'a Decoder,
    layers: &'a StageLayers,
    /// In training: the factor on the loss before backward.
    loss_factor: Option<f64>,
    /// Which tokens are counted, i.e. not padding; `None` for all.
    counted: Option<Arc<[bool]>>,
    /// In training: the tokens of the run that the stage sees, which key the dropout masks.
    block: Option<TokenBlock>,
    documents: Option<PackedDocuments>,
    /// The context-parallel ranks of these sequences; `None` for the model's own.
    parallel: Option<ContextParallel>,
}

impl Decoder {
    /// Stage `chunk` of this rank; a model without a pipeline has one stage.
    ///
    /// # Panics
    /// If there is no such stage.
    pub fn stage(&self, chunk: usize) -> Stage<'_> {
        let layers = &self.parts.stages[chunk];
        Stage {
            model: self,
            layers,
            loss_factor: None,
            counted: None,
            block: None,
            documents: None,
            parallel: None,
        }
    }

    /// The stage of this rank to which the parameter at `path` belongs; the first one if two use
    /// it.
    pub fn chunk_of(&self, path: &str) -> usize {
        let mut names = path.split('.');
        let name = names.next();
        let number = names.next().and_then(|n| n.parse::<usize>().ok());
        let has = |stage: &StageLayers| match (name, number) {
            (Some("blocks"), Some(number)) if number < self.config().layers => {
                stage.layers.contains(&number)
            }
            (Some("embedding" | "positions"), _) => stage.embedding,
            _ => stage.loss,
        };
        let stages = &self.parts.stages;
        // No stage has it: it is the last stage's copy of the first stage's embedding.
        stages.iter().position(has).unwrap_or(stages.len() - 1)
    }

    /// The layers of each stage of this rank.
    pub fn stages(&self) -> &[StageLayers] {
        &self.parts.stages
    }
}

impl<'a> Stage<'a> {
    /// The layers of the stage.
    pub fn layers(&self) -> &'a StageLayers {
        self.layers
    }

    /// Enables training mode for `tokens`: applies the dropout of
    /// [`with_dropout`](Decoder::with_dropout).
    #[must_use]
    pub fn training(self, tokens: TokenBlock) -> Self {
        Self {
            block: Some(tokens),
            ..self
        }
    }

    /// Sets, for training, the `factor` with which the loss is multiplied before backward. Losses
    /// that layers add are multiplied by it too.
    #[must_use]
    pub fn with_loss_factor(self, factor: f64) -> Self {
        Self {
            loss_factor: Some(factor),
            ..self
        }
    }

    /// Sets which tokens are [counted](TokenContext::counted); `None` for all.
    ///
    /// # Shapes
    /// `[S, B]`
    #[must_use]
    pub fn counting(self, counted: Option<Arc<[bool]>>) -> Self {
        Self { counted, ..self }
    }

    /// Sets the packed documents of the rows, which do not attend to each other.
    #[must_use]
    pub fn of_documents(self, documents: Option<PackedDocuments>) -> Self {
        Self { documents, ..self }
    }

    /// Sets context-parallel ranks for these sequences in place of those of
    /// [`with_context_parallel`](Decoder::with_context_parallel); `None` for the latter. Dropout is
    /// not supported here: its masks depend on the chunks of the model's own ranks.
    ///
    /// # Panics
    /// If the stage is in [training](Self::training) mode with tokens that key dropout masks.
    #[must_use]
    pub fn shared_by(self, parallel: Option<ContextParallel>) -> Self {
        assert!(
            parallel.is_none() || self.block.is_none(),
            "dropout is not supported with context-parallel ranks other than the model's own"
        );
        Self { parallel, ..self }
    }

    /// The chunks of each sequence that this rank holds.
    pub(super) fn zigzag(&self) -> Zigzag {
        self.parallel
            .as_ref()
            .map_or(self.model.parts.zigzag, ContextParallel::zigzag)
    }

    /// The residual stream after the first stage.
    ///
    /// # Shapes
    /// tokens `[S, B]`
    pub fn from_tokens(&self, tokens: Tensor<2, Int>) -> Residual {
        let Self {
            model,
            block,
            documents,
            ..
        } = self;
        let len = tokens.dims()[0] * self.zigzag().ranks();
        let positions = if model.has_position_vectors() {
            model.positions_of(len, self.zigzag(), documents.as_ref())
        } else {
            Vec::new()
        };
        let device = tokens.device();
        let x = model.embed(tokens, &positions);
        let x = match (&model.dropout, block) {
            (Some(dropout), Some(block)) => dropout.forward(x, block),
            _ => x,
        };
        self.forward_blocks(x.into(), len, &device)
    }

    /// The residual stream after a later stage, from the output of the stage before.
    ///
    /// # Shapes
    /// `[S, B, H]`, with sequence parallelism `[S / n, B, H]`; unchanged
    pub fn from_stream(&self, x: Tensor<3>) -> Residual {
        let parts = &self.model.parts;
        let splits = if parts.sequence_parallel {
            parts.group.size()
        } else {
            1
        };
        let len = x.dims()[0] * splits * self.zigzag().ranks();
        let device = x.device().inner();
        self.forward_blocks(x.into(), len, &device)
    }

    /// The sum of the next-token losses after the last stage; see [`Decoder::loss`].
    ///
    /// # Shapes
    /// labels `[S, B]`; the sum is `[1]`, equal on every member
    pub fn loss(&self, x: Residual, labels: Tensor<2, Int>) -> Tensor<1> {
        self.model.loss_of(x, labels)
    }

    /// The logits of the full vocabulary after the last stage, on every member.
    ///
    /// # Shapes
    /// output `[S, B, vocab]`
    pub fn full_logits(&self, x: Residual) -> Tensor<3> {
        self.model.gathered(self.model.logits(x))
    }

    /// Applies the blocks of the stage to sequences of `len` tokens.
    fn forward_blocks(&self, x: Residual, len: usize, device: &Device) -> Residual {
        let context = self.context(len, self.counted.clone(), device);
        let blocks: Vec<&Block> = self.blocks().collect();
        let DecoderParts {
            recompute, offload, ..
        } = &self.model.parts;
        let segments = recompute.segments(blocks.len());
        offload.begin();
        let through = |x, Segment { blocks: of, again }| {
            // If the loss follows, backward starts with this segment at once, so offloading it
            // would not pay.
            let is_last = of.end == blocks.len() && self.layers.loss;
            let blocks = &blocks[of];
            if !again {
                return blocks.iter().fold(x, |x, block| block.forward(x, &context));
            }
            recompute.with_selective_save(|| {
                if recompute.offload {
                    forward_offloaded(blocks, x, context.clone(), offload, is_last)
                } else {
                    forward_checkpointed(blocks, x, context.clone())
                }
            })
        };
        segments.into_iter().fold(x, through)
    }

    /// The context of the layers for sequences of `len` tokens, of which some are `counted`.
    pub(super) fn context(
        &self,
        len: usize,
        counted: Option<Arc<[bool]>>,
        device: &Device,
    ) -> TokenContext {
        let Self {
            model,
            loss_factor,
            block,
            documents,
            parallel,
            ..
        } = self.clone();
        let rope = model.rope_of(len, self.zigzag(), documents.as_ref(), device);
        TokenContext {
            rope,
            loss_factor,
            counted,
            block,
            documents,
            parallel,
        }
    }

    /// The blocks of the stage.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        let of_rank = self
            .layers
            .layers
            .clone()
            .map(|index| &self.model.blocks[index]);
        of_rank.map(|block| block.as_ref().expect("a stage has all its blocks"))
    }
}

/// Applies blocks that save only the residual stream before them.
fn forward_checkpointed(blocks: &[&Block], x: Residual, context: TokenContext) -> Residual {
    let (normed, x) = x.normed(&blocks[0].attention_norm);
    let blocks: Vec<Block> = blocks.iter().copied().cloned().collect();
    checkpoint_residual(&blocks, normed, x, move |blocks, normed, x| {
        let x = blocks[0].forward_after_norm(normed, x, &context);
        blocks[1..]
            .iter()
            .fold(x, |x, block| block.forward(x, &context))
    })
}

/// Like [`forward_checkpointed`], but offloads the residual stream to host memory, except for the
/// last group of the model.
fn forward_offloaded(
    blocks: &[&Block],
    x: Residual,
    context: TokenContext,
    offload: &ActivationOffload,
    is_last: bool,
) -> Residual {
    let blocks: Vec<Block> = blocks.iter().copied().cloned().collect();
    offload_residual(&blocks, x, offload, is_last, move |blocks, x| {
        blocks.iter().fold(x, |x, block| block.forward(x, &context))
    })
}

#[cfg(test)]
mod tests {
    use megaburn_collective::Group;
    use megaburn_parallel::lazy_params;

    use super::*;
    use crate::{DecoderConfig, Family};

    /// The chunk of each parameter, with the first part of its path and the number of its block.
    fn chunks(family: Family, tied: bool, stages: &[StageLayers]) -> Vec<(String, usize)> {
        let vocab = 16;
        let hidden = 8;
        let layers = 6;
        let ffn = 8;
        let heads = 2;
        let kv_heads = 2;
        let head_dim = 4;
        let max_seq_len = 4;
        let sizes = DecoderConfig {
            vocab,
            hidden,
            ffn,
            layers,
            ..family.template()
        };
        let config = DecoderConfig {
            heads,
            kv_heads,
            head_dim,
            max_seq_len,
            tied,
            ..sizes
        };
        let group = Group::single(0);
        let model = config
            .init_stages(stages, &group, false, &Device::flex())
            .unwrap();
        let mut found: Vec<_> = lazy_params(&model)
            .into_iter()
            .map(|param| {
                let mut names = param.path.split('.');
                let name = names.next().expect("a path has a name");
                let number = names
                    .next()
                    .filter(|_| name == "blocks")
                    .unwrap_or_default();
                (format!("{name}{number}"), model.chunk_of(&param.path))
            })
            .collect();
        found.dedup();
        found
    }

    #[test]
    fn a_parameter_is_of_the_stage_that_uses_it() {
        let stage = |embedding, layers, loss| StageLayers {
            embedding,
            layers,
            loss,
        };
        let of = |expected: &[(&str, usize)]| {
            expected
                .iter()
                .map(|(name, chunk)| (name.to_string(), *chunk))
                .collect::<Vec<_>>()
        };
        // A rank that has both ends of the model, and one that has only the last.
        let both = [
            stage(true, 0..2, false),
            stage(false, 2..2, false),
            stage(false, 5..6, true),
        ];
        let expected = of(&[
            ("embedding", 0),
            ("positions", 0),
            ("blocks0", 0),
            ("blocks1", 0),
            ("blocks5", 2),
            ("norm", 2),
        ]);
        assert_eq!(chunks(Family::Gpt2, true, &both), expected);
        let last = [stage(false, 1..3, false), stage(false, 5..6, true)];
        let blocks = [("blocks1", 0), ("blocks2", 0), ("blocks5", 1), ("norm", 1)];
        let tied = [&[("embedding", 1)], &blocks[..]].concat();
        assert_eq!(chunks(Family::Llama, true, &last), of(&tied));
        let own = [&blocks[..], &[("head", 1)]].concat();
        assert_eq!(chunks(Family::Llama, false, &last), of(&own));
    }
}
