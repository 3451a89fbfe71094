use burn::prelude::Device;
use megaburn_collective::Group;
use megaburn_kernels::RopeTable;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{ContextComm, ContextParallel, PackedDocuments};

use super::{Decoder, Positions};
use crate::ModelError;

impl Decoder {
    /// Enables context parallelism: each sequence is split over the ranks of `group`, so tokens,
    /// labels and streams are those of this rank's [chunks](Zigzag). `comms` says how attention
    /// exchanges keys and values: one element for all layers, or one per layer of the full model.
    ///
    /// # Errors
    /// The number of `comms` is neither 1 nor the number of layers, or the heads are not divisible
    /// by the ranks where heads are exchanged for sequence.
    /// # Collective
    /// Nothing is sent.
    pub fn with_context_parallel(
        mut self,
        group: &Group,
        comms: &[ContextComm],
    ) -> Result<Self, ModelError> {
        let layers = self.config().layers;
        if ![1, layers].contains(&comms.len()) {
            let found = comms.len();
            let why = format!(
                "{found} cp_comm values are given for {layers} layers: give one, or one per layer"
            );
            return Err(ModelError::Config(why));
        }
        // Layers with equal `comm` share its communicators.
        let mut made: Vec<ContextParallel> = Vec::new();
        for (index, place) in self.blocks.iter_mut().enumerate() {
            let comm = comms[index.min(comms.len() - 1)];
            let parallel = match made.iter().find(|made| made.comm() == comm) {
                Some(parallel) => parallel.clone(),
                None => ContextParallel::new(group, comm)?,
            };
            let with = |block: super::Block| block.with_context_parallel(&parallel, index);
            *place = place.take().map(with).transpose()?;
            made.push(parallel);
        }
        let zigzag = Zigzag::new(group.rank(), group.size());
        self.dropout = self.dropout.map(|dropout| dropout.with_context(zigzag));
        self.parts.zigzag = zigzag;
        self.parts.context = group.clone();
        Ok(self)
    }

    /// The chunks of each sequence that this rank holds.
    pub fn zigzag(&self) -> Zigzag {
        self.parts.zigzag
    }

    /// The positions of the chunks of `zigzag` in sequences of `len` tokens: one list per sequence,
    /// or one list for all.
    pub(super) fn positions_of(
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

    /// The rotary table for the chunks of `zigzag` in sequences of `len` tokens.
    pub(super) fn rope_of(
        &self,
        len: usize,
        zigzag: Zigzag,
        documents: Option<&PackedDocuments>,
        device: &Device,
    ) -> Option<RopeTable> {
        match documents {
            None => self.rope(len, zigzag, device),
            Some(_) => {
                // Positions restart in each document, so the table of the model's longest sequence
                // has all of them.
                let table = self.rope(self.config().max_seq_len, Zigzag::WHOLE, device)?;
                Some(table.rows(&self.positions_of(len, zigzag, documents)))
            }
        }
    }

    /// Whether the model has learned position embeddings.
    pub(super) fn has_position_vectors(&self) -> bool {
        self.config().positions == Positions::Learned
    }
}
