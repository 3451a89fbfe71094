use std::sync::{Arc, Mutex};

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::{Group, region::gather_from_last_dim};
use megaburn_kernels::{UnchangedWeights, WeightSpan, add_positions, sum_all};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ActivationOffload, Attention, BatchContext, CrossEntropy, Norm, ParallelDropout,
    PositionEmbedding, Recomputable, RelativeBias, Residual, Sharded, VocabParallelEmbedding,
};
use megaburn_pipeline::StageLayers;

use super::{
    BinaryHead, Block, DecoderConfig, FamilyHead, LossInput, MaskedHead, ModelOptions,
    rotary::Ropes,
};

/// A transformer, a decoder, an encoder or both: the layers of one or more stages of a pipeline, or without a
/// pipeline the whole model. Parts of other ranks are `None`. Every parameter has the same path as
/// in the full model.
///
/// [`forward`](Self::forward) and [`loss`](Self::loss) apply the whole model outside of training. A
/// pipeline, and training with options that depend on the [batch](BatchContext), compose it from
/// [`embed`](Self::embed), [`forward_stage`](Self::forward_stage) and [`losses`](Self::losses).
///
/// Shapes: `S` sequence, `B` batch, `V` padded vocabulary, `n` tensor-parallel ranks. With context
/// parallelism `S` is this rank's part of the sequence. With sequence parallelism the residual
/// stream between the blocks has `S / n` positions.
///
/// # Collective
/// All members of the tensor-parallel group, and the context-parallel ranks, call every method
/// together. Nothing is sent to another stage.
#[derive(Module, Sharded, Debug)]
pub struct Decoder {
    /// Token embedding: on the first stage, and on the last one if it is tied or used by
    /// multi-token prediction.
    pub embedding: Option<VocabParallelEmbedding>,
    /// Learned position embeddings; `None` for rotary positions.
    pub positions: Option<PositionEmbedding>,
    /// The vectors of token types, on the first stage of a model that has them.
    pub token_types: Option<PositionEmbedding>,
    /// The norm of the embeddings, on the first stage of a model that has it.
    pub embedding_norm: Option<Norm>,
    /// The relative bias of the blocks that see later positions, on every stage with such blocks.
    pub encoder_bias: Option<RelativeBias>,
    /// The relative bias of the causal blocks, on every stage with such blocks.
    pub decoder_bias: Option<RelativeBias>,
    /// The blocks, those of an encoder first, followed by those of multi-token prediction; `None` for blocks of other ranks.
    pub blocks: Vec<Option<Block>>,
    /// The last norm; `None` if blocks end with a norm of the residual stream.
    pub norm: Option<Norm>,
    /// The layers between the last block and the output projection of a masked language model.
    pub masked_head: Option<MaskedHead>,
    /// The output projection; `None` if it is tied to the embedding.
    pub head: Option<VocabParallelEmbedding>,
    /// The head that classifies rows.
    pub binary_head: Option<BinaryHead>,
    /// The family's own layers between the last norm and the logits; `None` in most families.
    pub output_head: Option<FamilyHead>,
    /// Dropout on the embeddings.
    pub(super) dropout: ParallelDropout,
    /// Dropout on the embeddings of a decoder that follows an encoder.
    pub(super) decoder_dropout: ParallelDropout,
    #[module(skip)]
    pub(super) parts: DecoderParts,
}

/// The parts of a decoder that are not parameters.
#[derive(Clone, Debug)]
pub(super) struct DecoderParts {
    pub(super) config: DecoderConfig,
    pub(super) options: ModelOptions,
    pub(super) stages: Vec<StageLayers>,
    pub(super) loss: CrossEntropy,
    pub(super) offload: ActivationOffload,
    pub(super) group: Group,
    /// The context-parallel ranks. In generation, prompts are split over them.
    pub(super) cp: Group,
    /// The chunks of each sequence that this rank holds.
    pub(super) zigzag: Zigzag,
    /// The rotary tables of the last call, which all calls of a run share, with the device, the
    /// chunks, and the number of positions and tokens of the sequences.
    pub(super) ropes: Arc<Mutex<Option<CachedRopes>>>,
    /// Says when no weight changes, so that quantised weights are kept.
    pub(super) weights: WeightSpan,
}

/// Tables with their device, chunks of sequences, and numbers of positions and tokens.
type CachedRopes = ((Device, Zigzag, [usize; 2]), Ropes);

impl Decoder {
    /// `head(norm(blocks(embed(tokens))))`: the logits of this rank's part of the vocabulary.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, V / n]`
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.hidden_states(tokens); // blocks(embed(tokens))
        self.logits(x) // head(norm(x))
    }

    /// Begins a time in which no weight changes, so that each layer with a
    /// [precision](super::Precision) quantises its weight once. It ends when the result is dropped.
    pub fn unchanged_weights(&self) -> UnchangedWeights {
        self.parts.weights.unchanged()
    }

    /// The sum of the next-token losses in nats; labels of -100 are ignored.
    ///
    /// # Shapes
    /// tokens and labels `[S, B]`; the sum is `[1]`, equal on every member
    pub fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<1> {
        self.loss_of(self.final_norm(self.hidden_states(tokens)), labels)
    }

    /// The logits of the full vocabulary, on every member.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, vocab]`
    pub fn full_logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.full_logits_of(self.hidden_states(tokens))
    }

    /// The embeddings of tokens, with which the first stage starts.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, H]` (with sequence parallelism `[S / n, B, H]`). In an
    /// encoder-decoder model, the tokens are those of the encoder, then those of the decoder.
    ///
    /// # Panics
    /// If this rank does not have the first stage, or as [`forward_stage`](Self::forward_stage).
    pub fn embed(&self, tokens: Tensor<2, Int>, batch: &BatchContext) -> Tensor<3> {
        if self.config().is_encoder_decoder() {
            return self.embed_halves(tokens, batch);
        }
        let x = self.embed_with_positions(tokens, batch);
        self.dropout.forward(x, batch.block)
    }

    /// The embeddings of the tokens at all positions of rows.
    pub(super) fn embed_with_positions(
        &self,
        tokens: Tensor<2, Int>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        let positions = self.learned_positions(tokens.dims()[0], batch);
        self.embed_in(tokens, &positions, batch)
    }

    /// The logits of the full vocabulary after the last stage, on every member.
    ///
    /// # Shapes
    /// output `[S, B, vocab]`
    pub fn full_logits_of(&self, x: Residual) -> Tensor<3> {
        self.gather_vocab(self.logits(x))
    }

    /// The sizes and parts of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.parts.config
    }

    /// The attention of this rank's layers, with the numbers of the layers.
    pub fn attentions(&self) -> impl Iterator<Item = (usize, &Attention)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(index, block)| Some((index, &block.as_ref()?.attention)))
    }

    /// The tensor-parallel group.
    pub fn group(&self) -> &Group {
        &self.parts.group
    }

    /// `blocks(embed(tokens))`: the residual stream after the last block of a model in one stage.
    fn hidden_states(&self, tokens: Tensor<2, Int>) -> Residual {
        let batch = BatchContext::default();
        self.forward_stage(0, self.embed(tokens, &batch), &batch)
    }

    /// The norm of the sum of the embeddings of tokens, positions and token types, of which the model
    /// may have only some.
    pub(super) fn embed_in(
        &self,
        tokens: Tensor<2, Int>,
        positions: &[Vec<usize>],
        batch: &BatchContext,
    ) -> Tensor<3> {
        let [_, rows] = tokens.dims();
        let mut x = self.embed_at(tokens, positions);
        if let Some(vectors) = &self.token_types {
            let types = self.type_vectors(vectors, rows, &x, batch);
            x = x + types;
        }
        match &self.embedding_norm {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }

    /// The token embeddings, plus position embeddings if the model has them. `positions` has one
    /// list per sequence, or one list for all.
    pub(super) fn embed_at(&self, tokens: Tensor<2, Int>, positions: &[Vec<usize>]) -> Tensor<3> {
        let x = self.embed_tokens(tokens);
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

    pub(super) fn embed_tokens(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let embedding = self.embedding.as_ref();
        let x = embedding
            .expect("the first stage, and one whose loss needs it, has the embedding")
            .forward(tokens);
        scaled(x, self.parts.config.multipliers.embedding)
    }

    /// [`loss`](Self::loss), computed from the output of the last norm.
    pub(super) fn loss_of(&self, normed: Recomputable<3>, labels: Tensor<2, Int>) -> Tensor<1> {
        let loss = if normed.device().is_autodiff() {
            self.parts.loss.clone()
        } else {
            self.parts.loss.plain()
        };
        let losses = if self.parts.options.fused_linear_cross_entropy {
            let normed = self.scaled_for_logits(normed);
            self.output().losses(normed, labels, &loss)
        } else if let Some(own_loss) = self.config().family.definition().loss() {
            own_loss(LossInput {
                hidden: normed.clone().into_tensor(),
                logits: self.logits_of(normed),
                labels,
                cross_entropy: &loss,
                group: &self.parts.group,
            })
        } else {
            loss.forward(self.logits_of(normed), labels)
        };
        sum_all(losses)
    }

    /// `head(norm(x))`: the logits of this rank's part of the vocabulary.
    pub(super) fn logits(&self, x: Residual) -> Tensor<3> {
        self.logits_of(self.final_norm(x))
    }

    /// [`logits`](Self::logits), computed from the output of the last norm.
    fn logits_of(&self, normed: Recomputable<3>) -> Tensor<3> {
        let x = match &self.masked_head {
            Some(head) => head.forward(normed).into(),
            None => normed,
        };
        let x = self.scaled_for_logits(x);
        let logits = match (&self.output_head, &self.masked_head) {
            (Some(head), _) => head.logits(x.into_tensor(), self.output()),
            (None, Some(head)) => self.output().logits_with_bias(x, &head.vocab),
            (None, None) => self.output().logits(x),
        };
        self.capped(logits)
    }

    /// The input of the output projection, divided by the divisor of the logits, which are linear in
    /// it.
    fn scaled_for_logits(&self, normed: Recomputable<3>) -> Recomputable<3> {
        let config = &self.parts.config;
        match config.multipliers.logits_scaling * config.width_multiplier() {
            1.0 => normed,
            divisor => scaled(normed.into_tensor(), divisor.recip()).into(),
        }
    }

    /// The logits after the soft cap, if the model has one.
    fn capped(&self, logits: Tensor<3>) -> Tensor<3> {
        match self.parts.config.logits_soft_cap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    pub(super) fn final_norm(&self, x: Residual) -> Recomputable<3> {
        match &self.norm {
            Some(norm) => x.normed(norm),
            None => x.sum().into(),
        }
    }

    /// The output projection.
    fn output(&self) -> &VocabParallelEmbedding {
        let output = self.head.as_ref().or(self.embedding.as_ref());
        output.expect("the last stage has the norm and the head")
    }

    /// The logits of the full vocabulary, without its padding.
    pub(super) fn gather_vocab(&self, logits: Tensor<3>) -> Tensor<3> {
        let logits = gather_from_last_dim(logits, &self.parts.group);
        logits.narrow(2, 0, self.parts.config.vocab)
    }
}

fn scaled(x: Tensor<3>, factor: f64) -> Tensor<3> {
    if factor == 1.0 { x } else { x * factor }
}
