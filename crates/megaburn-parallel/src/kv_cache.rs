//! The key/value cache of generation.

use burn::tensor::Tensor;
use megaburn_collective::Group;

use crate::context::{PackedShare, Piece, Segment};

/// Tokens of several sequences in one forward pass, each sequence continuing from its cached
/// tokens. Nothing is padded: prompts of any length and single next tokens can share a pass.
///
/// After the packed batches of Yu et al., "Orca" (2022).
#[derive(Clone, Debug)]
pub struct Packed {
    segments: Vec<Segment>,
    /// Which of the tokens this rank reads; `None` means all.
    share: Option<PackedShare>,
}

impl Packed {
    /// Creates a pass from the `(sequence, first position, tokens)` of each segment, in token
    /// order.
    pub fn new(segments: impl IntoIterator<Item = (usize, usize, usize)>) -> Self {
        let mut end = 0;
        let segment = |(sequence, start, len): (usize, usize, usize)| {
            let rows = end..end + len;
            end = rows.end;
            Segment {
                sequence,
                rows,
                start,
            }
        };
        Self {
            segments: segments.into_iter().map(segment).collect(),
            share: None,
        }
    }

    /// Splits the tokens of the pass over the ranks of `group`, if there are enough of them. Each
    /// rank then reads its own rows, and all ranks have all keys and values.
    #[must_use]
    pub fn shared_by(self, group: &Group) -> Self {
        Self {
            share: PackedShare::of(&self.segments, group),
            ..self
        }
    }

    /// Number of rows on this rank: the tokens that it reads, padded to the largest count of any
    /// rank.
    pub fn num_rows(&self) -> usize {
        self.share
            .as_ref()
            .map_or(self.num_tokens(), PackedShare::num_rows)
    }

    /// This rank's rows of `all`, which has one value per token of the pass; `none` for padding
    /// rows.
    pub fn own<T: Copy>(&self, all: &[T], none: T) -> Vec<T> {
        self.share
            .as_ref()
            .map_or_else(|| all.to_vec(), |share| share.own(all, none))
    }

    /// For each segment, this rank's row of its last token, if this rank reads that token.
    pub fn last_rows(&self) -> Vec<Option<usize>> {
        let last = self.segments.iter().map(|segment| segment.rows.end - 1);
        last.map(|row| match &self.share {
            Some(share) => share.place(row),
            None => Some(row),
        })
        .collect()
    }

    /// The pieces of sequences that this rank reads, in row order.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        match &self.share {
            Some(share) => share.pieces().to_vec(),
            None => Piece::whole(&self.segments),
        }
    }

    pub(crate) fn share(&self) -> Option<&PackedShare> {
        self.share.as_ref()
    }

    /// The segments, in token order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Number of tokens in the pass.
    pub fn num_tokens(&self) -> usize {
        self.segments.last().map_or(0, |segment| segment.rows.end)
    }

    /// For each token, the length of its sequence after the pass.
    pub fn lens(&self) -> Vec<usize> {
        let lens = |s: &Segment| std::iter::repeat_n(s.start + s.rows.len(), s.rows.len());
        self.segments.iter().flat_map(lens).collect()
    }

    /// The position of each token in its own sequence.
    pub fn positions(&self) -> Vec<usize> {
        let positions = |s: &Segment| s.start..s.start + s.rows.len();
        self.segments.iter().flat_map(positions).collect()
    }
}

/// Keys and values of one attention layer for some sequences, for the heads of one rank.
#[derive(Clone, Debug)]
pub struct KvCache {
    sequences: Vec<Option<[Rows; 2]>>,
}

impl KvCache {
    /// An empty cache for `num_sequences` sequences.
    pub fn new(num_sequences: usize) -> Self {
        Self {
            sequences: vec![None; num_sequences],
        }
    }

    /// Appends keys and values to a sequence and returns all of its keys and values.
    ///
    /// # Shapes
    /// `[tokens, 1, kv_heads, head_dim]` in; out, all tokens of the sequence
    pub(crate) fn append(
        &mut self,
        sequence: usize,
        k: Tensor<4>,
        v: Tensor<4>,
    ) -> (Tensor<4>, Tensor<4>) {
        let slot = &mut self.sequences[sequence];
        let rows = match slot.take() {
            Some([keys, values]) => [keys.append(k), values.append(v)],
            None => [Rows::new(k), Rows::new(v)],
        };
        let [keys, values] = slot.insert(rows);
        (keys.all(), values.all())
    }

    /// Sets the keys and values of a sequence, such as those of an encoder's output.
    ///
    /// # Shapes
    /// `[tokens, 1, kv_heads, head_dim]`
    pub fn put(&mut self, sequence: usize, keys_values: [Tensor<4>; 2]) {
        self.sequences[sequence] = Some(keys_values.map(Rows::new));
    }

    /// All keys and values of a sequence, if it has any.
    pub(crate) fn of(&self, sequence: usize) -> Option<[Tensor<4>; 2]> {
        let rows = self.sequences[sequence].as_ref()?;
        Some(rows.each_ref().map(Rows::all))
    }

    /// Forgets a sequence.
    pub fn clear(&mut self, sequence: usize) {
        self.sequences[sequence] = None;
    }
}

/// A growable tensor of rows. Its spare capacity lets most appends write only the new rows.
#[derive(Clone, Debug)]
struct Rows {
    /// `[capacity, 1, kv_heads, head_dim]`
    memory: Tensor<4>,
    len: usize,
}

impl Rows {
    fn new(rows: Tensor<4>) -> Self {
        let len = rows.dims()[0];
        Self { memory: rows, len }
    }

    fn append(self, rows: Tensor<4>) -> Self {
        let Self { mut memory, len } = self;
        let [room, _, heads, size] = memory.dims();
        let end = len + rows.dims()[0];
        if end > room {
            let more = end.max(2 * len) - len;
            let options = (&memory.device(), memory.dtype());
            let empty = Tensor::zeros([more, 1, heads, size], options);
            memory = Tensor::cat(vec![memory.narrow(0, 0, len), empty], 0);
        }
        Self {
            memory: memory.slice_assign([len..end, 0..1, 0..heads, 0..size], rows),
            len: end,
        }
    }

    fn all(&self) -> Tensor<4> {
        self.memory.clone().narrow(0, 0, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_stand_side_by_side_and_count_their_own_positions() {
        let packed = Packed::new([(2, 0, 3), (0, 7, 1), (1, 4, 2)]);
        assert_eq!(packed.num_tokens(), 6);
        assert_eq!(packed.positions(), [0, 1, 2, 7, 4, 5]);
        assert_eq!(packed.lens(), [3, 3, 3, 8, 6, 6]);
        assert_eq!(
            packed.segments()[2],
            Segment {
                sequence: 1,
                rows: 4..6,
                start: 4
            }
        );
        assert_eq!(Packed::new([]).num_tokens(), 0);
    }
}
