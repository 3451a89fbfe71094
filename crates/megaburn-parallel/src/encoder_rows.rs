//! The encoder's positions in the batch of an encoder-decoder model.

use std::sync::{Arc, Mutex, PoisonError};

use megaburn_kernels::PackedSequences;
use megaburn_mesh::PackedRows;

use crate::context::PackedDocuments;

/// Which positions of a batch belong to the encoder of an encoder-decoder model. They come first in
/// the tokens, and the positions of the decoder follow.
#[derive(Clone, Debug)]
pub struct EncoderRows {
    /// Number of positions of the encoder, including padding, over all tensor-parallel ranks.
    pub len: usize,
    /// Number of tokens of each row without padding, which is at its end; `None` means that all rows
    /// are full.
    pub held: Option<Arc<[usize]>>,
    derived: Arc<Mutex<Derived>>,
}

/// What attention derives from the rows, shared by all layers.
#[derive(Debug, Default)]
struct Derived {
    documents: Option<PackedDocuments>,
    /// The sequences of cross attention, with the decoder's number of positions.
    crossed: Option<(usize, PackedSequences)>,
}

impl EncoderRows {
    /// Rows of `len` positions, of which row `i` holds `held[i]` tokens.
    ///
    /// # Panics
    /// If a row holds more tokens than it has positions.
    pub fn new(len: usize, held: Option<Arc<[usize]>>) -> Self {
        let most = held.iter().flat_map(|held| held.iter()).max();
        let most = most.copied().unwrap_or(0);
        assert!(
            most <= len,
            "an encoder's row of {len} positions cannot hold {most} tokens"
        );
        Self {
            len,
            held,
            derived: Arc::default(),
        }
    }

    /// The documents that the encoder's self-attention is given: the tokens of each row, and its
    /// padding. `None` if no row has padding.
    pub fn documents(&self) -> Option<PackedDocuments> {
        let held = self.padded()?;
        let mut derived = self.derived.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let rows = held.iter().map(|held| vec![0, *held, self.len]).collect();
            let rows = PackedRows::new(rows).expect("no row holds more than its positions");
            PackedDocuments::new(rows)
        };
        Some(derived.documents.get_or_insert_with(new).clone())
    }

    /// The sequences of cross attention from `s_q` positions of the decoder: all of them see the
    /// tokens of their row of the encoder, and no one its padding. `None` if no row has padding.
    pub(crate) fn crossed(&self, s_q: usize) -> Option<PackedSequences> {
        let held = self.padded()?;
        let mut derived = self.derived.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = derived.crossed.as_ref().filter(|(of, _)| *of == s_q) {
            return Some(found.clone());
        }
        let queries = held.iter().map(|_| [0, s_q, s_q]);
        let keys = held.iter().map(|held| [0, *held, self.len]);
        let sequences = PackedSequences::new(queries).with_keys(keys);
        derived.crossed = Some((s_q, sequences.clone()));
        Some(sequences)
    }

    /// The tokens of each row, if some row has padding.
    fn padded(&self) -> Option<&[usize]> {
        let held = self.held.as_deref()?;
        held.iter().any(|held| *held < self.len).then_some(held)
    }
}

impl PartialEq for EncoderRows {
    fn eq(&self, other: &Self) -> bool {
        (self.len, &self.held) == (other.len, &other.held)
    }
}

impl Eq for EncoderRows {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_padding_needs_documents() {
        assert!(EncoderRows::new(4, None).documents().is_none());
        let full = EncoderRows::new(4, Some([4, 4].into()));
        assert!(full.documents().is_none() && full.crossed(3).is_none());
        let padded = EncoderRows::new(4, Some([4, 1].into()));
        let documents = padded.documents().unwrap();
        let rows = documents.documents().cu_seqlens();
        assert_eq!(rows, [vec![0, 4, 4], vec![0, 1, 4]]);
        for s_q in [3, 5] {
            let expected = PackedSequences::new([[0, s_q, s_q]; 2]);
            let expected = expected.with_keys([[0, 4, 4], [0, 1, 4]]);
            assert_eq!(padded.crossed(s_q), Some(expected));
        }
    }

    #[test]
    #[should_panic(expected = "row of 3 positions cannot hold 4 tokens")]
    fn rows_beyond_their_positions_are_refused() {
        EncoderRows::new(3, Some([4].into()));
    }
}
