use burn::tensor::Tensor;
use megaburn_parallel::{BatchContext, Residual};
use megaburn_pipeline::StageLayers;

use super::Decoder;

impl Decoder {
    /// The residual stream after stage `chunk` of this rank, from the [embeddings](Self::embed) or
    /// the output of the stage before. A model without a pipeline has one stage.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`). In an encoder-decoder
    /// model, `S` counts the positions of the encoder, then those of the decoder, and the last stage
    /// returns the decoder's only.
    ///
    /// # Panics
    /// If there is no such stage, an encoder-decoder model is not given
    /// [`BatchContext::encoder`](megaburn_parallel::BatchContext), or a training batch whose tokens key dropout masks has
    /// context-parallel ranks of its own: the masks depend on the chunks of the model's ranks.
    pub fn forward_stage(&self, chunk: usize, x: Tensor<3>, batch: &BatchContext) -> Residual {
        self.parts.offload.begin();
        if self.config().is_encoder_decoder() {
            return self.forward_halves(chunk, x, batch);
        }
        let blocks = self.parts.stages[chunk].layers.clone();
        self.forward_blocks(chunk, blocks, x, None, batch)
    }

    /// The number of positions of the residual stream `x` over the tensor-parallel ranks.
    pub(super) fn num_tokens(&self, x: &Tensor<3>) -> usize {
        x.dims()[0] * self.shards()
    }

    /// The number of ranks over which the positions of the residual stream are split.
    pub(super) fn shards(&self) -> usize {
        if self.parts.options.sequence_parallel {
            self.parts.group.size()
        } else {
            1
        }
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
        let uses_bias = |stage: &StageLayers, of_encoder| {
            let stage = std::slice::from_ref(stage);
            self.config().uses_bias(stage, of_encoder)
        };
        let has = |stage: &StageLayers| match (name, number) {
            (Some("blocks"), Some(number)) if number < self.config().layers => {
                stage.layers.contains(&number)
            }
            (Some("embedding" | "positions" | "token_types" | "embedding_norm"), _) => {
                stage.embedding
            }
            (Some("encoder_bias"), _) => uses_bias(stage, true),
            (Some("decoder_bias"), _) => uses_bias(stage, false),
            _ => stage.loss,
        };
        let stages = &self.parts.stages;
        // No stage has it: it is the last stage's copy of the first stage's embedding.
        stages.iter().position(has).unwrap_or(stages.len() - 1)
    }
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
