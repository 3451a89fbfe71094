//! Packed sequences, as attention sees them.

use std::fmt;
use std::ops::Range;
#[cfg(feature = "cuda")]
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use burn_cubecl::tensor::CubeTensor;

/// The bounds of packed sequences in the rows of a tensor (`cu_seqlens`). A query sees keys of its
/// own sequence only, and positions count from each sequence's first key.
///
/// ```
/// use megaburn_kernels::PackedSequences;
///
/// // Sequences of 3, 5 and 4 tokens in the 12 rows of a batch of one.
/// let packed = PackedSequences::new([[0, 3, 8, 12]]);
/// // A batch of two rows, each with bounds of its own.
/// let rows = PackedSequences::new([vec![0, 12], vec![0, 7, 12]]);
/// // Keys of another number than queries: 3 queries see 6 keys, 5 see none, 4 see 2.
/// let crossed = packed.with_keys([[0, 6, 6, 8]]);
/// // The last 2 of 6 tokens and the last 3 of 9 see all that is before them.
/// let last = PackedSequences::new([[0, 2, 5]]).with_keys([[0, 6, 15]]).with_offsets([[4, 6]]);
/// # let _ = (rows, crossed, last);
/// ```
#[derive(Clone)]
pub struct PackedSequences {
    /// The bounds of the queries, by row of the batch.
    queries: Vec<Vec<usize>>,
    keys: Vec<Vec<usize>>,
    /// The position of each sequence's first query, counted in its keys; `None` means 0 for all.
    offsets: Option<Vec<Vec<usize>>>,
    #[cfg(feature = "cuda")]
    /// Bounds that were uploaded to the GPU.
    pub(in crate::attention) on_gpu: Arc<OnceLock<Bounds>>,
}

/// The bounds of each query's keys, and of each key's queries, on a GPU.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug)]
pub(in crate::attention) struct Bounds {
    pub(in crate::attention) of_queries: CubeTensor,
    pub(in crate::attention) of_keys: CubeTensor,
}

/// The queries of one sequence, and the keys that they see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::attention) struct Sequence {
    /// The row of the batch.
    pub(in crate::attention) row: usize,
    pub(in crate::attention) queries: Range<usize>,
    pub(in crate::attention) keys: Range<usize>,
    /// The position of the first query, counted in the sequence's keys.
    pub(in crate::attention) offset: usize,
}

impl PackedSequences {
    /// The start of each sequence and the end of the last one, by row of the batch, for both
    /// queries and keys. Sequences may be empty.
    pub fn new(cu_seqlens: impl IntoIterator<Item = impl Into<Vec<usize>>>) -> Self {
        let queries: Vec<_> = cu_seqlens.into_iter().map(Into::into).collect();
        Self::of(queries.clone(), queries, None)
    }

    /// Sets separate bounds for the keys, with as many sequences in each row.
    pub fn with_keys(self, cu_seqlens: impl IntoIterator<Item = impl Into<Vec<usize>>>) -> Self {
        let keys = cu_seqlens.into_iter().map(Into::into).collect();
        Self::of(self.queries, keys, self.offsets)
    }

    /// Sets the position of each sequence's first query, counted in its keys, by row of the batch:
    /// for queries that do not start where their keys do. The offset in
    /// [`AttentionOptions`](crate::AttentionOptions) is added to it.
    pub fn with_offsets(self, offsets: impl IntoIterator<Item = impl Into<Vec<usize>>>) -> Self {
        let offsets = offsets.into_iter().map(Into::into).collect();
        Self::of(self.queries, self.keys, Some(offsets))
    }

    fn of(
        queries: Vec<Vec<usize>>,
        keys: Vec<Vec<usize>>,
        offsets: Option<Vec<Vec<usize>>>,
    ) -> Self {
        Self {
            queries,
            keys,
            offsets,
            #[cfg(feature = "cuda")]
            on_gpu: Default::default(),
        }
    }

    /// Panics unless the bounds fit `b` rows of `s_q` queries and `s_k` keys.
    pub(super) fn check(&self, b: usize, s_q: usize, s_k: usize) {
        for (what, bounds, len) in [("queries", &self.queries, s_q), ("keys", &self.keys, s_k)] {
            assert_eq!(
                bounds.len(),
                b,
                "attention: cu_seqlens of {what} must have one entry per row of the batch ({b})"
            );
            for row in bounds {
                let rising = row.windows(2).all(|pair| pair[0] <= pair[1]);
                assert!(
                    rising && row.first() == Some(&0) && row.last() == Some(&len),
                    "attention: cu_seqlens {row:?} must increase from 0 to the number of {what}, \
                    {len}"
                );
            }
        }
        for (queries, keys) in self.queries.iter().zip(&self.keys) {
            let queries = queries.len() - 1;
            let keys = keys.len() - 1;
            assert_eq!(
                queries, keys,
                "attention: a row must have as many sequences of queries as of keys"
            );
        }
        let Some(offsets) = &self.offsets else { return };
        let counts = |rows: &[Vec<usize>], of: usize| -> Vec<usize> {
            rows.iter().map(|row| row.len() - of).collect()
        };
        let found = counts(offsets, 0);
        let expected = counts(&self.queries, 1);
        assert_eq!(
            found, expected,
            "attention: there must be one query offset per sequence"
        );
        // Kernels count positions in 32 bits.
        let most = (i32::MAX as usize / 2).saturating_sub(s_q.max(s_k));
        let far = offsets.iter().flatten().find(|offset| **offset > most);
        assert!(
            far.is_none(),
            "attention: the offset {far:?} of a sequence exceeds {most}"
        );
    }

    /// All sequences, row by row and in order.
    pub(in crate::attention) fn sequences(&self) -> impl Iterator<Item = Sequence> {
        self.queries
            .iter()
            .zip(&self.keys)
            .enumerate()
            .flat_map(move |(row, (queries, keys))| {
                let ranges = queries.windows(2).zip(keys.windows(2)).enumerate();
                ranges.map(move |(index, (q, k))| {
                    let offset = self
                        .offsets
                        .as_ref()
                        .map_or(0, |offsets| offsets[row][index]);
                    Sequence {
                        row,
                        queries: q[0]..q[1],
                        keys: k[0]..k[1],
                        offset,
                    }
                })
            })
    }
}

impl PartialEq for PackedSequences {
    fn eq(&self, other: &Self) -> bool {
        let parts = |x: &Self| (x.queries.clone(), x.keys.clone(), x.offsets.clone());
        parts(self) == parts(other)
    }
}

impl fmt::Debug for PackedSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("PackedSequences");
        text.field("queries", &self.queries)
            .field("keys", &self.keys);
        text.field("offsets", &self.offsets).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_what_lies_between_the_bounds() {
        let packed = PackedSequences::new([vec![0, 2, 5], vec![0, 0, 5]]).with_keys([[0, 4, 4]; 2]);
        packed.check(2, 5, 4);
        let found: Vec<_> = packed
            .sequences()
            .map(|s| (s.row, s.queries, s.keys))
            .collect();
        assert_eq!(
            found,
            [
                (0, 0..2, 0..4),
                (0, 2..5, 4..4),
                (1, 0..0, 0..4),
                (1, 0..5, 4..4)
            ]
        );
        let packed = packed.with_offsets([[2, 0], [0, 7]]);
        packed.check(2, 5, 4);
        assert!(packed.sequences().map(|s| s.offset).eq([2, 0, 0, 7]));
    }

    #[test]
    #[should_panic(
        expected = "cu_seqlens [0, 3, 2, 5] must increase from 0 to the number of queries, 5"
    )]
    fn bounds_that_fall_are_refused() {
        PackedSequences::new([[0, 3, 2, 5]]).check(1, 5, 5);
    }

    #[test]
    #[should_panic(expected = "there must be one query offset per sequence")]
    fn an_offset_for_each_sequence_is_asked_for() {
        PackedSequences::new([[0, 2, 5]])
            .with_offsets([[0]])
            .check(1, 5, 5);
    }

    #[test]
    #[should_panic(expected = "one entry per row of the batch (2)")]
    fn bounds_of_fewer_rows_are_refused() {
        PackedSequences::new([[0, 5]]).check(2, 5, 5);
    }
}
