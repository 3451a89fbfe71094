//! Applies the blocks of a stage, some of which backward recomputes.

use std::ops::Range;

use burn::{module::Module, tensor::Tensor};
use megaburn_parallel::{
    BatchContext, RelativeBias, Residual, SelectiveSave, checkpoint_residual, offload_residual,
};

use super::{Block, Decoder, block_inputs::BlockInputs, rotary::Ropes};

/// Consecutive blocks, and the relative bias that they share: what a recomputed function needs of
/// the model.
#[derive(Module, Debug)]
struct RecomputedBlocks {
    /// The number of the first block.
    #[module(skip)]
    first: usize,
    blocks: Vec<Block>,
    bias: Option<RelativeBias>,
}

/// The stream after block `number`, which is counted if the run asks for statistics.
fn counted(number: usize, x: Residual, batch: &BatchContext) -> Residual {
    if let Some(statistics) = &batch.statistics {
        statistics.add(number, &x);
    }
    x
}

impl Decoder {
    /// The residual stream after blocks of a stage that see the same positions. `memory` is the
    /// output of the encoder for blocks that attend to it. Without recompute this is
    /// `for block in blocks { x = block.forward(x) }`.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`)
    pub(super) fn forward_blocks(
        &self,
        chunk: usize,
        own: Range<usize>,
        x: Tensor<3>,
        memory: Option<Tensor<3>>,
        batch: &BatchContext,
    ) -> Residual {
        let len = self.num_tokens(&x);
        let ropes = self.ropes(len, batch, &x.device().inner());
        let stage = &self.parts.stages[chunk];
        let bias = self.bias_of(own.start);
        let mut x = Residual::from(x);
        for segment in self
            .parts
            .options
            .recompute
            .segments_of(self.config(), &stage.layers)
        {
            if !own.contains(&segment.blocks.start) {
                continue;
            }
            // If the loss follows, backward starts with this segment at once, so offloading it
            // would not pay.
            let keep_on_device = segment.blocks.end == stage.layers.end && stage.loss;
            let numbers = segment.blocks.clone();
            let blocks = self.blocks_at(segment.blocks);
            x = if segment.recomputed {
                let recomputed = RecomputedBlocks {
                    first: numbers.start,
                    blocks: blocks.cloned().collect(),
                    bias: bias.cloned(),
                };
                let memory = memory.clone();
                self.forward_recomputed(
                    recomputed,
                    x,
                    memory,
                    (len, ropes.clone()),
                    batch,
                    keep_on_device,
                )
            } else {
                let line = bias.map(|bias| bias.forward(len));
                let inputs = BlockInputs {
                    ropes: &ropes,
                    bias: line.as_ref(),
                    memory: memory.as_ref(),
                    batch,
                };
                let numbered = numbers.zip(blocks);
                numbered.fold(x, |x, (number, block)| {
                    let x = counted(number, block.forward(x, inputs), batch);
                    match &batch.observer {
                        Some(observer) => observer.observe_residual(number, x),
                        None => x,
                    }
                })
            };
        }
        x
    }

    /// Applies blocks of which only the residual stream before them is saved: on the device or, with
    /// `recompute.offload` and unless `keep_on_device` is set, in host memory.
    fn forward_recomputed(
        &self,
        recomputed: RecomputedBlocks,
        x: Residual,
        memory: Option<Tensor<3>>,
        (len, ropes): (usize, Ropes),
        batch: &BatchContext,
        keep_on_device: bool,
    ) -> Residual {
        let recompute = self.parts.options.recompute;
        let saved = recompute.selective_save(&x.device());
        let batch = BatchContext {
            saved_attention: saved.clone(),
            ..batch.clone()
        };
        let forward =
            move |recomputed: &RecomputedBlocks, x: Residual, memory: Option<Tensor<3>>| {
                let bias = recomputed.bias.as_ref().map(|bias| bias.forward(len));
                let inputs = BlockInputs {
                    ropes: &ropes,
                    bias: bias.as_ref(),
                    memory: memory.as_ref(),
                    batch: &batch,
                };
                let blocks = (recomputed.first..).zip(&recomputed.blocks);
                blocks.fold(x, |x, (number, block)| {
                    counted(number, block.forward(x, inputs), &batch)
                })
            };
        let x = if recompute.offload {
            let offload = &self.parts.offload;
            offload_residual(&recomputed, x, memory, offload, keep_on_device, forward)
        } else {
            let norm = recomputed.blocks[0].attention_norm.as_ref();
            checkpoint_residual(&recomputed, norm, x, memory, forward)
        };
        saved.iter().for_each(SelectiveSave::end_forward);
        x
    }

    /// The relative bias of the blocks like block `index`, if the model has one.
    pub(super) fn bias_of(&self, index: usize) -> Option<&RelativeBias> {
        if self.config().sees_later(index) {
            self.encoder_bias.as_ref()
        } else {
            self.decoder_bias.as_ref()
        }
    }

    /// Blocks of this rank.
    pub(super) fn blocks_at(&self, blocks: Range<usize>) -> impl Iterator<Item = &Block> {
        self.blocks[blocks]
            .iter()
            .map(|block| block.as_ref().expect("a stage has all its blocks"))
    }
}
