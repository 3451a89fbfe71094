use std::sync::PoisonError;

use burn::{prelude::Device, tensor::Tensor};
use megaburn_mesh::Zigzag;
use megaburn_parallel::{BatchContext, ContextParallel, PackedDocuments, PositionEmbedding};

use super::{Decoder, rotary::Ropes};

impl Decoder {
    /// The chunks of each sequence that this rank holds.
    pub fn zigzag(&self) -> Zigzag {
        self.parts.zigzag
    }

    /// The chunks of each sequence of the batch that this rank holds.
    pub(super) fn zigzag_of(&self, batch: &BatchContext) -> Zigzag {
        assert!(
            batch.parallel.is_none() || batch.block.is_none(),
            "dropout is not supported with context-parallel ranks other than the model's own"
        );
        let parallel = batch.parallel.as_ref();
        parallel.map_or(self.parts.zigzag, ContextParallel::zigzag)
    }

    /// The positions of the first stage's `len` tokens on this rank, if the model has vectors for
    /// them; otherwise none.
    pub(super) fn learned_positions(&self, len: usize, batch: &BatchContext) -> Vec<Vec<usize>> {
        let zigzag = self.zigzag_of(batch);
        if self.config().learns_positions() {
            self.positions_of(len * zigzag.ranks(), zigzag, batch.documents.as_ref())
        } else {
            Vec::new()
        }
    }

    /// The vectors of the token types of `rows` rows, which are added to the stream `x`.
    pub(super) fn type_vectors(
        &self,
        vectors: &PositionEmbedding,
        rows: usize,
        x: &Tensor<3>,
        batch: &BatchContext,
    ) -> Tensor<3> {
        match &batch.token_types {
            Some(types) => vectors.forward_each(types),
            None => vectors.forward_each(&vec![vec![0; self.num_tokens(x)]; rows]),
        }
    }

    /// The positions of the chunks of `zigzag` in sequences of `len` tokens: one list per sequence,
    /// or one list for all.
    fn positions_of(
        &self,
        len: usize,
        zigzag: Zigzag,
        documents: Option<&PackedDocuments>,
    ) -> Vec<Vec<usize>> {
        let limit = self.config().max_seq_len;
        // Positions of context-parallel padding are never read; clamp them.
        let padding = match (zigzag.ranks(), documents) {
            (1, None) => 0,
            (ranks, None) => 2 * ranks * self.parts.group.size(),
            (_, Some(_)) => len,
        };
        let place = |at: usize| {
            assert!(
                at < limit + padding,
                "position {at} exceeds the model's {limit} positions"
            );
            if padding > 0 { at.min(limit - 1) } else { at }
        };
        match documents.map(PackedDocuments::documents) {
            None => vec![zigzag.positions(len).map(place).collect()],
            Some(documents) => {
                let of_row = |row| documents.positions(row, zigzag).map(place).collect();
                (0..documents.num_rows()).map(of_row).collect()
            }
        }
    }

    /// The rotary tables of a batch whose sequences have `len` tokens on this rank.
    pub(super) fn ropes(&self, len: usize, batch: &BatchContext, device: &Device) -> Ropes {
        let zigzag = self.zigzag_of(batch);
        let len = len * zigzag.ranks();
        let unpadded = batch.seq_len.unwrap_or(len);
        match batch.documents.as_ref() {
            _ if !self.parts.config.positions.has_tables() => Ropes::default(),
            None => self.rope_tables(len, zigzag, unpadded, device),
            documents => {
                // Positions restart in each document, so the tables of the model's longest sequence
                // have all of them.
                let tables =
                    self.rope_tables(self.config().max_seq_len, Zigzag::WHOLE, unpadded, device);
                tables.rows(&self.positions_of(len, zigzag, documents), device)
            }
        }
    }

    /// The rotary tables of the chunks of `zigzag` in sequences of `seq_len` positions. The length
    /// `len` determines the frequencies of dynamic NTK and longrope.
    fn rope_tables(&self, seq_len: usize, zigzag: Zigzag, len: usize, device: &Device) -> Ropes {
        let mut cached = self
            .parts
            .ropes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let key = (device.clone(), zigzag, [seq_len, len]);
        if let Some((held, ropes)) = &*cached
            && *held == key
        {
            return ropes.clone();
        }
        let positions = zigzag.positions(seq_len).map(|position| (position, len));
        let ropes = Ropes::new(&self.parts.config, positions, device);
        *cached = Some((key, ropes.clone()));
        ropes
    }
}
