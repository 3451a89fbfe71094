use burn::{prelude::Int, tensor::Tensor};
use megaburn_parallel::Residual;
use megaburn_pipeline::StageLayers;

use super::Decoder;

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
}

impl Decoder {
    /// Stage `chunk` of those that this rank has; a model that is no part of a pipeline has one.
    ///
    /// # Panics
    /// If there is none.
    pub fn stage(&self, chunk: usize) -> Stage<'_> {
        Stage { model: self, layers: &self.parts.stages[chunk] }
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

    /// The stream behind the first stage.
    ///
    /// # Shapes
    /// tokens `[S, B]`
    pub fn from_tokens(&self, tokens: Tensor<2, Int>) -> Residual {
        let positions: Vec<usize> = (0..tokens.dims()[0]).collect();
        let device = tokens.device();
        let x = Residual::from(self.model.embed(tokens, &positions));
        let rope = self.model.rope(positions.len(), &device);
        self.blocks().fold(x, |x, block| block.forward(x, rope.as_ref()))
    }

    /// The stream behind another one, of what the stage before made.
    ///
    /// # Shapes
    /// `[S, B, H]`, with sequence parallelism `[S / n, B, H]`; unchanged
    pub fn from_stream(&self, x: Tensor<3>) -> Residual {
        let parts = &self.model.parts;
        let splits = if parts.sequence_parallel { parts.group.size() } else { 1 };
        let rope = self.model.rope(x.dims()[0] * splits, &x.device().inner());
        self.blocks().fold(x.into(), |x, block| block.forward(x, rope.as_ref()))
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

    /// Its blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &super::Block> {
        let of_rank = self.layers.layers.clone().map(|index| &self.model.blocks[index]);
        of_rank.map(|block| block.as_ref().expect("a stage has its blocks"))
    }
}
