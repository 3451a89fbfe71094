use std::collections::VecDeque;

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, region::reduce_from};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    BatchContext, KvCache, Norm, Packed, PositionEmbedding, Residual, VocabParallelEmbedding,
};

use super::{
    Block, Decoder, FamilyHead, ModelOptions,
    block_inputs::{BlockCache, BlockInputs},
    model::DecoderParts,
    rotary::Ropes,
};

/// The KV cache of a model on one rank: keys and values of several sequences, for all layers.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    pub(super) layers: Vec<BlockCache>,
    /// Number of tokens of each sequence.
    lens: Vec<usize>,
    /// The tokens of sequences that the encoder has not read yet.
    prompts: VecDeque<(usize, Vec<u32>)>,
}

impl DecoderCache {
    /// Number of cached tokens of a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens[sequence]
    }

    /// Whether no sequence holds a token.
    pub fn is_empty(&self) -> bool {
        self.lens.iter().all(|&len| len == 0)
    }

    /// Records that the tokens `next` were read.
    pub fn advance(&mut self, next: &[(usize, &[u32])]) {
        for (sequence, tokens) in next {
            self.lens[*sequence] += tokens.len();
        }
    }

    /// The next tokens of several sequences, packed after their cached tokens.
    fn packed(&self, next: &[(usize, &[u32])], group: &Group) -> Packed {
        let segment =
            |(sequence, tokens): &(usize, &[u32])| (*sequence, self.lens[*sequence], tokens.len());
        Packed::new(next.iter().map(segment)).shared_by(group)
    }

    /// Clears a sequence, whose length is then 0. What its encoder read stays.
    pub fn clear(&mut self, sequence: usize) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.own.clear(sequence));
        self.lens[sequence] = 0;
    }

    /// Gives the encoder of an encoder-decoder model the tokens that a sequence answers. The next
    /// pass reads them first.
    pub fn ask(&mut self, sequence: usize, prompt: &[u32]) {
        self.prompts.push_back((sequence, prompt.to_vec()));
    }

    /// The next sequence whose prompt the encoder has not read yet, and the prompt.
    pub fn next_prompt(&mut self) -> Option<(usize, Vec<u32>)> {
        self.prompts.pop_front()
    }
}

impl Decoder {
    /// The same model and weights, prepared for generation: without autodiff, and with unsharded
    /// sequences on every rank.
    pub fn for_generation(&self) -> Self {
        let Self {
            embedding,
            positions,
            token_types,
            embedding_norm,
            encoder_bias,
            decoder_bias,
            blocks,
            norm,
            masked_head,
            head,
            binary_head,
            output_head,
            dropout,
            decoder_dropout,
            parts,
        } = self.valid();
        Self {
            embedding: embedding.map(VocabParallelEmbedding::whole_sequence),
            positions: positions.map(PositionEmbedding::whole_sequence),
            token_types: token_types.map(PositionEmbedding::whole_sequence),
            embedding_norm: embedding_norm.map(Norm::whole_sequence),
            encoder_bias,
            decoder_bias,
            // Generation does not use the blocks of multi-token prediction.
            blocks: blocks
                .into_iter()
                .take(parts.config.layers)
                .map(|block| block.map(Block::whole_sequence))
                .collect(),
            norm: norm.map(Norm::whole_sequence),
            head: head.map(VocabParallelEmbedding::whole_sequence),
            masked_head,
            binary_head,
            output_head: output_head.map(FamilyHead::whole_sequence),
            dropout,
            decoder_dropout,
            parts: DecoderParts {
                options: ModelOptions {
                    sequence_parallel: false,
                    ..parts.options
                },
                zigzag: Zigzag::WHOLE,
                ..parts
            },
        }
    }

    /// An empty cache for `num_sequences` sequences.
    pub fn cache(&self, num_sequences: usize) -> DecoderCache {
        let empty = KvCache::new(num_sequences);
        let layer = BlockCache {
            own: empty.clone(),
            memory: empty,
        };
        DecoderCache {
            layers: vec![layer; self.config().layers],
            lens: vec![0; num_sequences],
            prompts: VecDeque::new(),
        }
    }

    /// Number of rows that this rank reads of `next`, as in [`next_stream`](Self::next_stream).
    /// Prompts are split over the ranks of [`ModelGroups::cp`](super::ModelGroups::cp).
    pub fn num_rows(&self, next: &[(usize, &[u32])], cache: &DecoderCache) -> usize {
        cache.packed(next, &self.parts.cp).num_rows()
    }

    /// Reads the next tokens of several sequences, given as `(sequence, tokens)`, and returns the
    /// logits after the last token of each, in the given order. An encoder-decoder model reads
    /// prompts that the cache was [given](DecoderCache::ask) before them. The model must not use sequence
    /// parallelism, and the device must not use autodiff.
    ///
    /// # Collective
    /// All members of the tensor-parallel group, and the context-parallel ranks over which prompts
    /// are split.
    ///
    /// # Shapes
    /// output `[sequences given, 1, vocab]`, equal on every member
    ///
    /// # Panics
    /// If `next` is empty, or a sequence has no next token.
    pub fn next_logits(
        &self,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
        device: &Device,
    ) -> Tensor<3> {
        while let Some((sequence, prompt)) = cache.next_prompt() {
            self.read_prompt(0, None, (sequence, &prompt), cache, device);
        }
        let x = self.next_stream(0, None, next, cache, device);
        self.logits_from_stream(x, next, cache)
    }

    /// The residual stream of the next tokens after stage `chunk` of this rank. The first stage
    /// starts from the tokens, a later one from `x`, the output of the stage before. After the last
    /// stage of the rank, call [`logits_from_stream`](Self::logits_from_stream) or
    /// [`DecoderCache::advance`].
    ///
    /// # Shapes
    /// `[rows, 1, H]`, with rows of [`num_rows`](Self::num_rows)
    ///
    /// # Panics
    /// As [`next_logits`](Self::next_logits).
    pub fn next_stream(
        &self,
        chunk: usize,
        x: Option<Tensor<3>>,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
        device: &Device,
    ) -> Tensor<3> {
        assert!(!next.is_empty() && next.iter().all(|(_, tokens)| !tokens.is_empty()));
        let packed = cache.packed(next, &self.parts.cp);
        let positions = packed.own(&packed.positions(), 0);
        let lens = packed.own(&packed.lens(), 0);
        let places = positions.iter().copied().zip(lens);
        let ropes = Ropes::new(self.config(), places, device);
        let x = x.unwrap_or_else(|| {
            let tokens = next
                .iter()
                .flat_map(|(_, tokens)| tokens.iter().map(|&id| i64::from(id)));
            let own = packed.own(&tokens.collect::<Vec<_>>(), 0);
            let tokens = TensorData::new(own, [packed.num_rows(), 1]);
            let tokens = Tensor::<2, Int>::from_data(tokens, device);
            self.embed_in(tokens, &[positions], &BatchContext::default())
        });
        // The encoder has read its tokens before.
        let [encoder, blocks] = self.config().halves(&self.parts.stages[chunk].layers);
        let blocks = if self.config().is_encoder_decoder() {
            blocks
        } else {
            encoder.start..blocks.end
        };
        let longest = packed.lens().into_iter().max().unwrap_or(0);
        let bias = self.bias_of(blocks.start);
        let bias = bias.map(|bias| bias.forward(longest));
        let inputs = BlockInputs {
            ropes: &ropes,
            bias: bias.as_ref(),
            memory: None,
            batch: &BatchContext::default(),
        };
        let layers = &mut cache.layers[blocks.clone()];
        let mut x = Residual::from(x);
        for (block, layer) in self.blocks_at(blocks).zip(layers) {
            x = block.forward_cached(x, inputs, &packed, layer);
        }
        x.sum()
    }

    /// The logits after the last token of each element of `next`, from the output `x` of the last
    /// stage.
    ///
    /// # Shapes
    /// `[rows, 1, H]` to `[sequences given, 1, vocab]`, equal on every member
    ///
    /// # Panics
    /// If the connection to another context-parallel rank fails, with the text of the error, like
    /// [regions](megaburn_collective::region).
    pub fn logits_from_stream(
        &self,
        x: Tensor<3>,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
    ) -> Tensor<3> {
        let group = &self.parts.cp;
        let packed = cache.packed(next, group);
        cache.advance(next);
        // Only the last token of each sequence needs logits.
        let last = packed.last_rows().into_iter().map(|row| match row {
            Some(row) => x.clone().narrow(0, row, 1),
            None => x.clone().narrow(0, 0, 1).zeros_like(),
        });
        let last = Tensor::cat(last.collect(), 0);
        let is_shared = packed.num_rows() < packed.num_tokens();
        let last = if is_shared {
            reduce_from(last, group)
        } else {
            last
        };
        // The logits of the ranks may differ in their last bits, but all ranks must sample the same
        // token, so all ranks use the logits of rank 0.
        let logits = self.gather_vocab(self.logits(last.into()));
        let mine = if group.rank() == 0 {
            logits
        } else {
            logits.zeros_like()
        };
        reduce_from(mine, group)
    }
}
