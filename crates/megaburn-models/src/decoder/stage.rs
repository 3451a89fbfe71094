use burn::{prelude::Int, tensor::Tensor};
use megaburn_kernels::RopeTable;
use megaburn_parallel::{Residual, TokenBlock, recomputed_stream};
use megaburn_pipeline::StageLayers;

use super::{Block, Context, Decoder, Segment};

/// One stage of a pipeline: from the tokens or the stream behind the stage before it to the stream
/// behind its own last block, or to the loss.
///
/// Shapes: as [`Decoder`]'s.
///
/// # Collective
/// All members of the tensor-parallel group; nothing is sent to another stage.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a> {
    model: &'a Decoder,
    layers: &'a StageLayers,
    /// In training: what of the run it sees.
    tokens: Option<TokenBlock>,
}

impl Decoder {
    /// Stage `chunk` of those that this rank has; a model that is no part of a pipeline has one.
    ///
    /// # Panics
    /// If there is none.
    pub fn stage(&self, chunk: usize) -> Stage<'_> {
        Stage { model: self, layers: &self.parts.stages[chunk], tokens: None }
    }

    /// What of the model the stages of this rank are.
    pub fn stages(&self) -> &[StageLayers] {
        &self.parts.stages
    }
}

impl Stage<'_> {
    /// What of the model it is.
    pub fn layers(&self) -> &StageLayers {
        self.layers
    }

    /// The same in training of `tokens`: it drops what the model was [told](Decoder::with_dropout) to.
    #[must_use]
    pub fn training(self, tokens: TokenBlock) -> Self {
        Self { tokens: Some(tokens), ..self }
    }

    /// The stream behind the first stage.
    ///
    /// # Shapes
    /// tokens `[S, B]`
    pub fn from_tokens(&self, tokens: Tensor<2, Int>) -> Residual {
        let positions: Vec<usize> = (0..tokens.dims()[0]).collect();
        let device = tokens.device();
        let x = self.model.embed(tokens, &positions);
        let x = match (&self.model.dropout, &self.tokens) {
            (Some(dropout), Some(tokens)) => dropout.forward(x, tokens),
            _ => x,
        };
        let rope = self.model.rope(positions.len(), &device);
        self.through_blocks(x.into(), rope)
    }

    /// The stream behind another one, of what the stage before made.
    ///
    /// # Shapes
    /// `[S, B, H]`, with sequence parallelism `[S / n, B, H]`; unchanged
    pub fn from_stream(&self, x: Tensor<3>) -> Residual {
        let parts = &self.model.parts;
        let splits = if parts.sequence_parallel { parts.group.size() } else { 1 };
        let rope = self.model.rope(x.dims()[0] * splits, &x.device().inner());
        self.through_blocks(x.into(), rope)
    }

    /// The sum of the next-token losses behind the last stage; see [`Decoder::loss`].
    ///
    /// # Shapes
    /// labels `[S, B]`; the sum is `[1]`, the same on every member
    pub fn loss(&self, x: Residual, labels: Tensor<2, Int>) -> Tensor<1> {
        self.model.loss_of(x, labels)
    }

    /// The logits of the whole vocabulary behind the last stage, on every member.
    ///
    /// # Shapes
    /// output `[S, B, vocab]`
    pub fn full_logits(&self, x: Residual) -> Tensor<3> {
        self.model.gathered(self.model.logits(x))
    }

    fn through_blocks(&self, x: Residual, rope: Option<RopeTable>) -> Residual {
        let context = Context { rope, tokens: self.tokens };
        let blocks: Vec<&Block> = self.blocks().collect();
        let segments = self.model.parts.recompute.segments(blocks.len());
        segments.into_iter().fold(x, |x, Segment { blocks: of, again }| match again {
            true => again_through(&blocks[of], x, context.clone()),
            false => blocks[of].iter().fold(x, |x, block| block.forward(x, &context)),
        })
    }

    /// Its blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Block> {
        let of_rank = self.layers.layers.clone().map(|index| &self.model.blocks[index]);
        of_rank.map(|block| block.as_ref().expect("a stage has its blocks"))
    }
}

/// The stream behind some blocks, of which nothing is kept but the stream before them.
fn again_through(blocks: &[&Block], x: Residual, context: Context) -> Residual {
    let (normed, x) = x.normed(&blocks[0].attention_norm);
    let blocks: Vec<Block> = blocks.iter().copied().cloned().collect();
    recomputed_stream(&blocks, normed, x, move |blocks, normed, x| {
        let x = blocks[0].behind_norm(normed, x, &context);
        blocks[1..].iter().fold(x, |x, block| block.forward(x, &context))
    })
}
