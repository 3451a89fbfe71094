use burn::tensor::Tensor;
use megaburn_parallel::{
    BatchContext, Residual, SelectiveSave, checkpoint_residual, offload_residual,
};
use megaburn_pipeline::StageLayers;

use super::{Block, Decoder, rotary::Ropes};

impl Decoder {
    /// The residual stream after stage `chunk` of this rank, from the [embeddings](Self::embed) or
    /// the output of the stage before. A model without a pipeline has one stage. Without recompute
    /// this is `for block in blocks { x = block.forward(x) }`.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`)
    ///
    /// # Panics
    /// If there is no such stage, or a training batch whose tokens key dropout masks has
    /// context-parallel ranks of its own: the masks depend on the chunks of the model's ranks.
    pub fn forward_stage(&self, chunk: usize, x: Tensor<3>, batch: &BatchContext) -> Residual {
        let ropes = self.ropes(self.num_tokens(&x), batch, &x.device().inner());
        let blocks: Vec<&Block> = self.blocks_of(chunk).collect();
        self.parts.offload.begin();
        let mut x = Residual::from(x);
        for segment in self.parts.options.recompute.segments(blocks.len()) {
            // If the loss follows, backward starts with this segment at once, so offloading it
            // would not pay.
            let keep_on_device =
                segment.blocks.end == blocks.len() && self.parts.stages[chunk].loss;
            let blocks = blocks[segment.blocks].iter().copied();
            x = if segment.recomputed {
                let blocks = blocks.cloned().collect();
                self.forward_recomputed(blocks, x, ropes.clone(), batch, keep_on_device)
            } else {
                forward_blocks(blocks, x, &ropes, batch)
            };
        }
        x
    }

    /// Applies blocks of which only the residual stream before them is saved: on the device or, with
    /// `recompute.offload` and unless `keep_on_device` is set, in host memory.
    fn forward_recomputed(
        &self,
        blocks: Vec<Block>,
        x: Residual,
        ropes: Ropes,
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
            move |blocks: &Vec<Block>, x: Residual| forward_blocks(blocks, x, &ropes, &batch);
        let x = if recompute.offload {
            offload_residual(&blocks, x, &self.parts.offload, keep_on_device, forward)
        } else {
            checkpoint_residual(&blocks, blocks[0].attention_norm.as_ref(), x, forward)
        };
        saved.iter().for_each(SelectiveSave::end_forward);
        x
    }

    /// The number of positions of the residual stream `x` over the tensor-parallel ranks.
    pub(super) fn num_tokens(&self, x: &Tensor<3>) -> usize {
        let shards = if self.parts.options.sequence_parallel {
            self.parts.group.size()
        } else {
            1
        };
        x.dims()[0] * shards
    }

    /// The blocks of stage `chunk` of this rank.
    pub(super) fn blocks_of(&self, chunk: usize) -> impl Iterator<Item = &Block> {
        let of_stage = &self.blocks[self.parts.stages[chunk].layers.clone()];
        of_stage
            .iter()
            .map(|block| block.as_ref().expect("a stage has all its blocks"))
    }

    /// The layers of each stage of this rank.
    pub fn stages(&self) -> &[StageLayers] {
        &self.parts.stages
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
            (Some("embedding" | "positions" | "token_types" | "embedding_norm"), _) => {
                stage.embedding
            }
            _ => stage.loss,
        };
        let stages = &self.parts.stages;
        // No stage has it: it is the last stage's copy of the first stage's embedding.
        stages.iter().position(has).unwrap_or(stages.len() - 1)
    }
}

/// Applies blocks one after the other.
fn forward_blocks<'a>(
    blocks: impl IntoIterator<Item = &'a Block>,
    mut x: Residual,
    ropes: &Ropes,
    batch: &BatchContext,
) -> Residual {
    for block in blocks {
        x = block.forward(x, ropes, batch);
    }
    x
}

#[cfg(test)]
mod tests {
    use burn::prelude::Device;
    use megaburn_collective::Group;
    use megaburn_parallel::lazy_params;

    use super::*;
    use crate::{
        decoder::{DecoderConfig, ModelOptions},
        families::Family,
    };

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
            .init_stages(stages, &group, &ModelOptions::default(), &Device::flex())
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
        assert_eq!(chunks(Family::GPT2, true, &both), expected);
        let last = [stage(false, 1..3, false), stage(false, 5..6, true)];
        let blocks = [("blocks1", 0), ("blocks2", 0), ("blocks5", 1), ("norm", 1)];
        let tied = [&[("embedding", 1)], &blocks[..]].concat();
        assert_eq!(chunks(Family::LLAMA, true, &last), of(&tied));
        let own = [&blocks[..], &[("head", 1)]].concat();
        assert_eq!(chunks(Family::LLAMA, false, &last), of(&own));
    }
}
