use std::ops::Range;

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_parallel::{KvCache, Packed, PositionEmbedding, Residual, VocabParallelEmbedding};

use super::{Block, Decoder};

/// Keys and values of some sequences that a model has read, for all its layers, on one rank.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    layers: Vec<KvCache>,
    /// Tokens that each sequence holds.
    lens: Vec<usize>,
}

impl DecoderCache {
    /// Tokens that a sequence holds.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens[sequence]
    }

    /// Whether no sequence holds a token.
    pub fn is_empty(&self) -> bool {
        self.lens.iter().all(|&len| len == 0)
    }

    /// Forgets a sequence, which is then as long as no token.
    pub fn clear(&mut self, sequence: usize) {
        self.layers.iter_mut().for_each(|layer| layer.clear(sequence));
        self.lens[sequence] = 0;
    }
}

impl Decoder {
    /// The same model and weights as generation needs them: without autodiff, every rank holding
    /// whole sequences.
    pub fn for_generation(&self) -> Self {
        let Self { embedding, positions, blocks, norm, head, parts } = self.valid();
        Self {
            embedding: embedding.whole_sequence(),
            positions: positions.map(PositionEmbedding::whole_sequence),
            blocks: blocks.into_iter().map(Block::whole_sequence).collect(),
            norm: norm.whole_sequence(),
            head: head.map(VocabParallelEmbedding::whole_sequence),
            parts,
        }
    }

    /// An empty cache for `num_sequences` sequences.
    pub fn cache(&self, num_sequences: usize) -> DecoderCache {
        DecoderCache {
            layers: vec![KvCache::new(num_sequences); self.blocks.len()],
            lens: vec![0; num_sequences],
        }
    }

    /// Reads the next tokens of some sequences, `(sequence, tokens)` each, and gives the logits of
    /// the token after each, in the order given. For a model without sequence parallelism, on a
    /// device without autodiff.
    ///
    /// # Shapes
    /// output `[sequences given, 1, vocab]`, the same on every member
    ///
    /// # Panics
    /// If there is nothing to read, or a sequence has no next token.
    pub fn next_logits(
        &self,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
        device: &Device,
    ) -> Tensor<3> {
        assert!(!next.is_empty() && next.iter().all(|(_, tokens)| !tokens.is_empty()));
        let segment =
            |(sequence, tokens): &(usize, &[u32])| (*sequence, cache.lens[*sequence], tokens.len());
        let packed = Packed::new(next.iter().map(segment));
        let positions = packed.positions();
        let rope = self.config().rope().map(|config| {
            let table = config.init(positions.iter().copied(), device);
            table.expect("the configuration was validated")
        });
        let tokens = next.iter().flat_map(|(_, tokens)| tokens.iter().map(|&id| i64::from(id)));
        let tokens = TensorData::new(tokens.collect(), [packed.num_tokens(), 1]);
        let tokens = Tensor::<2, Int>::from_data(tokens, device);
        let mut x = Residual::from(self.embed(tokens, &positions));
        for (block, layer) in self.blocks.iter().zip(&mut cache.layers) {
            x = block.forward_cached(x, rope.as_ref(), &packed, layer);
        }
        for (sequence, tokens) in next {
            cache.lens[*sequence] += tokens.len();
        }
        let x = x.sum();
        // Only the last token of each sequence is asked what follows it.
        let last = |rows: Range<usize>| x.clone().narrow(0, rows.end - 1, 1);
        let last = packed.segments().iter().map(|segment| last(segment.rows.clone())).collect();
        self.gathered(self.logits(Tensor::cat(last, 0).into()))
    }
}
