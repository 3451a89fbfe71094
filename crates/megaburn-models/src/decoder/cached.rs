use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{Group, region::reduce_from};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    KvCache, Norm, Packed, PositionEmbedding, Residual, VocabParallelEmbedding,
};

use super::{Block, Decoder, model::DecoderParts};

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
    fn packed(&self, next: &[(usize, &[u32])], group: &Group) -> Packed {
        let segment =
            |(sequence, tokens): &(usize, &[u32])| (*sequence, self.lens[*sequence], tokens.len());
        Packed::new(next.iter().map(segment)).shared_by(group)
    }

    /// Forgets a sequence, which is then as long as no token.
    pub fn clear(&mut self, sequence: usize) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.clear(sequence));
        self.lens[sequence] = 0;
    }
}

impl Decoder {
    /// The same model and weights as generation needs them: without autodiff, every rank holding
    /// whole sequences.
    pub fn for_generation(&self) -> Self {
        let Self {
            embedding,
            positions,
            blocks,
            norm,
            head,
            parts,
            ..
        } = self.valid();
        Self {
            embedding: embedding.map(VocabParallelEmbedding::whole_sequence),
            positions: positions.map(PositionEmbedding::whole_sequence),
            // None of those that predict further tokens.
            blocks: blocks
                .into_iter()
                .take(parts.config.layers)
                .map(|block| block.map(Block::whole_sequence))
                .collect(),
            norm: norm.map(Norm::whole_sequence),
            head: head.map(VocabParallelEmbedding::whole_sequence),
            dropout: None,
            parts: DecoderParts {
                sequence_parallel: false,
                zigzag: Zigzag::WHOLE,
                ..parts
            },
        }
    }

    /// An empty cache for `num_sequences` sequences.
    pub fn cache(&self, num_sequences: usize) -> DecoderCache {
        DecoderCache {
            layers: vec![KvCache::new(num_sequences); self.config().layers],
            lens: vec![0; num_sequences],
        }
    }

    /// Rows that a rank reads of these, as [`next_stream`](Self::next_stream) has them: the ranks of
    /// [`with_context_parallel`](Self::with_context_parallel) share prompts.
    pub fn num_rows(&self, next: &[(usize, &[u32])], cache: &DecoderCache) -> usize {
        cache.packed(next, &self.parts.context).num_rows()
    }

    /// Reads the next tokens of some sequences, `(sequence, tokens)` each, and gives the logits of
    /// the token after each, in the order given. For a model without sequence parallelism, on a
    /// device without autodiff.
    ///
    /// # Collective
    /// All members of the tensor-parallel group, and the ranks that share the reading of prompts.
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
        self.logits_from_stream(x, next, cache)
    }

    /// The stream behind the next tokens in stage `chunk` of this rank: of the tokens in the first stage,
    /// else of `x`, which the stage before made. [`logits_from_stream`](Self::logits_behind) or
    /// [`DecoderCache::advance`] must follow the last stage of the rank.
    ///
    /// # Shapes
    /// `[rows, 1, H]`, of [`num_rows`](Self::num_rows)
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
        let packed = cache.packed(next, &self.parts.context);
        let positions = packed.own(&packed.positions(), 0);
        let rope = self.config().rope().map(|config| {
            let table = config.init(positions.iter().copied(), device);
            table.expect("the configuration was validated")
        });
        let x = x.unwrap_or_else(|| {
            let tokens = next
                .iter()
                .flat_map(|(_, tokens)| tokens.iter().map(|&id| i64::from(id)));
            let own = packed.own(&tokens.collect::<Vec<_>>(), 0);
            let tokens = TensorData::new(own, [packed.num_rows(), 1]);
            self.embed(Tensor::<2, Int>::from_data(tokens, device), &[positions])
        });
        let stage = self.stage(chunk);
        let layers = &mut cache.layers[stage.layers().layers.clone()];
        let pass = |x: Residual, (block, layer): (&Block, &mut KvCache)| {
            block.forward_cached(x, rope.as_ref(), &packed, layer)
        };
        stage
            .blocks()
            .zip(layers)
            .fold(Residual::from(x), pass)
            .sum()
    }

    /// The logits of the token after each of `next`, of the stream that the last stage made of them.
    ///
    /// # Shapes
    /// `[rows, 1, H]` to `[sequences given, 1, vocab]`, the same on every member
    ///
    /// # Panics
    /// If ranks that share prompts lose each other, with the error's text, as
    /// [regions](megaburn_collective::region) do.
    pub fn logits_from_stream(
        &self,
        x: Tensor<3>,
        next: &[(usize, &[u32])],
        cache: &mut DecoderCache,
    ) -> Tensor<3> {
        let group = &self.parts.context;
        let packed = cache.packed(next, group);
        cache.advance(next);
        // Only the last token of each sequence is asked what follows it.
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
        // Products may have other last bits on each, and a choice between tokens must not.
        let logits = self.gathered(self.logits(last.into()));
        let mine = if group.rank() == 0 {
            logits
        } else {
            logits.zeros_like()
        };
        reduce_from(mine, group)
    }
}
