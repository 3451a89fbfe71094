use std::ops::Range;

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    KvCache, Norm, Packed, PositionEmbedding, Residual, VocabParallelEmbedding,
};

use super::{Block, Decoder, model::Parts};

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

    /// That these tokens were read.
    pub fn advance(&mut self, next: &[(usize, &[u32])]) {
        for (sequence, tokens) in next {
            self.lens[*sequence] += tokens.len();
        }
    }

    /// The next tokens of some sequences, behind what those hold.
    fn packed(&self, next: &[(usize, &[u32])]) -> Packed {
        Packed::new(
            next.iter().map(|(sequence, tokens)| (*sequence, self.lens[*sequence], tokens.len())),
        )
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
        let Self { embedding, positions, blocks, norm, head, parts, .. } = self.valid();
        Self {
            embedding: embedding.map(VocabParallelEmbedding::whole_sequence),
            positions: positions.map(PositionEmbedding::whole_sequence),
            blocks: blocks.into_iter().map(|block| block.map(Block::whole_sequence)).collect(),
            norm: norm.map(Norm::whole_sequence),
            head: head.map(VocabParallelEmbedding::whole_sequence),
            dropout: None,
            parts: Parts { sequence_parallel: false, zigzag: Zigzag::WHOLE, ..parts },
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
        let x = self.next_stream(0, None, next, cache, device);
        self.logits_behind(x, next, cache)
    }

    /// The stream behind the next tokens in stage `chunk` of this rank: of the tokens in the first stage,
    /// else of `x`, which the stage before made. [`logits_behind`](Self::logits_behind) or
    /// [`DecoderCache::advance`] must follow the last stage of the rank.
    ///
    /// # Shapes
    /// `[tokens given, 1, H]`
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
        let packed = cache.packed(next);
        let positions = packed.positions();
        let rope = self.config().rope().map(|config| {
            let table = config.init(positions.iter().copied(), device);
            table.expect("the configuration was validated")
        });
        let x = x.unwrap_or_else(|| {
            let tokens = next.iter().flat_map(|(_, tokens)| tokens.iter().map(|&id| i64::from(id)));
            let tokens = TensorData::new(tokens.collect(), [packed.num_tokens(), 1]);
            self.embed(Tensor::<2, Int>::from_data(tokens, device), &[positions])
        });
        let stage = self.stage(chunk);
        let layers = &mut cache.layers[stage.layers().layers.clone()];
        let pass = |x: Residual, (block, layer): (&Block, &mut KvCache)| {
            block.forward_cached(x, rope.as_ref(), &packed, layer)
        };
        stage.blocks().zip(layers).fold(Residual::from(x), pass).sum()
    }

    /// The logits of the token after each of `next`, of the stream that the last stage made of them.
    ///
    /// # Shapes
    /// `[tokens given, 1, H]` to `[sequences given, 1, vocab]`, the same on every member
    pub fn logits_behind(
        &self,
        x: Tensor<3>,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
    ) -> Tensor<3> {
        let packed = cache.packed(next);
        cache.advance(next);
        // Only the last token of each sequence is asked what follows it.
        let last = |rows: Range<usize>| x.clone().narrow(0, rows.end - 1, 1);
        let last = packed.segments().iter().map(|segment| last(segment.rows.clone())).collect();
        self.gathered(self.logits(Tensor::cat(last, 0).into()))
    }
}
