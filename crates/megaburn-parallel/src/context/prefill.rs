//! Prompts that context-parallel ranks read together.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData};
use megaburn_collective::{Group, Lane, tensors};

use super::unwrap_collective;

/// The tokens of one sequence in a [`Packed`](crate::Packed) pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the sequence in the cache.
    pub sequence: usize,
    /// Rows of its tokens in the pass.
    pub rows: Range<usize>,
    /// Position of its first token: the number of tokens that the cache already holds.
    pub start: usize,
}

/// How ranks share the tokens of a generation pass. As in training, each rank reads two of the
/// `2 n` chunks of each sequence, but here of any length. Keys and values are gathered on all
/// ranks, so that every rank continues from the same cache.
#[derive(Clone, Debug)]
pub(crate) struct PackedShare {
    group: Group,
    /// The pieces that this rank reads, concatenated.
    pieces: Vec<Piece>,
    /// Rows of every rank, including the padding at the end.
    len: usize,
    /// For each row of the pass, its index among all ranks' rows, concatenated rank by rank.
    places: Vec<usize>,
}

/// Rows of one sequence that a rank reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the segment in the pass.
    pub(crate) segment: usize,
    /// Rows in the pass.
    rows: Range<usize>,
    /// Rows on this rank.
    pub(crate) own: Range<usize>,
    /// Position of the first row in its sequence.
    pub(crate) start: usize,
}

impl Piece {
    /// All of each segment, where one rank reads the full pass.
    pub(crate) fn whole(segments: &[Segment]) -> Vec<Self> {
        let piece = |(index, Segment { rows, start, .. }): (usize, &Segment)| {
            let (rows, own) = (rows.clone(), rows.clone());
            Self {
                segment: index,
                rows,
                own,
                start: *start,
            }
        };
        segments.iter().enumerate().map(piece).collect()
    }
}

/// The pieces that `rank` of `ranks` reads.
fn pieces(segments: &[Segment], rank: usize, ranks: usize) -> Vec<Piece> {
    let chunks = 2 * ranks;
    let mut end = 0;
    let of_segment = |(index, segment): (usize, &Segment)| {
        [rank, chunks - 1 - rank].map(|chunk| {
            let len = segment.rows.len();
            let [first, last] = [chunk, chunk + 1].map(|at| len * at / chunks);
            let rows = segment.rows.start + first..segment.rows.start + last;
            (index, rows, segment.start + first)
        })
    };
    let all = segments.iter().enumerate().flat_map(of_segment);
    let piece = |(segment, rows, start): (usize, Range<usize>, usize)| {
        let own = end..end + rows.len();
        end = own.end;
        (!own.is_empty()).then_some(Piece {
            segment,
            rows,
            own,
            start,
        })
    };
    all.filter_map(piece).collect()
}

fn num_rows(pieces: &[Piece]) -> usize {
    pieces.last().map_or(0, |piece| piece.own.end)
}

impl PackedShare {
    /// Splits the tokens of a pass; `None` where there are too few to be worth it.
    pub(crate) fn of(segments: &[Segment], group: &Group) -> Option<Self> {
        let num_tokens = segments.last().map_or(0, |segment| segment.rows.end);
        let of_ranks: Vec<_> = (0..group.size())
            .map(|rank| pieces(segments, rank, group.size()))
            .collect();
        let len = of_ranks
            .iter()
            .map(|of_rank| num_rows(of_rank))
            .max()
            .unwrap_or(0);
        if group.size() == 1 || len == num_tokens {
            return None;
        }
        let mut places = vec![0; num_tokens];
        for (rank, of_rank) in of_ranks.iter().enumerate() {
            for Piece { rows, own, .. } in of_rank {
                rows.clone()
                    .zip(own.clone())
                    .for_each(|(row, own)| places[row] = rank * len + own);
            }
        }
        let pieces = of_ranks
            .into_iter()
            .nth(group.rank())
            .expect("there is one entry per rank");
        Some(Self {
            group: group.clone(),
            pieces,
            len,
            places,
        })
    }

    /// Rows of every rank, including padding.
    pub(crate) fn num_rows(&self) -> usize {
        self.len
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// This rank's rows of `all`, which has one value per row of the pass; `none` for padding.
    pub(crate) fn own<T: Copy>(&self, all: &[T], none: T) -> Vec<T> {
        let held = self
            .pieces
            .iter()
            .flat_map(|piece| &all[piece.rows.clone()])
            .copied();
        let mut own: Vec<T> = held.collect();
        own.resize(self.len, none);
        own
    }

    /// The row on this rank that holds row `row` of the pass, if this rank reads it.
    pub(crate) fn place(&self, row: usize) -> Option<usize> {
        let rank = self.places[row] / self.len;
        let own = self.places[row] % self.len;
        (rank == self.group.rank()).then_some(own)
    }

    /// Gathers the rows of the full pass from the rows of all ranks.
    ///
    /// # Collective
    /// All ranks of the group: one all-gather.
    pub(crate) fn gathered(&self, own: Tensor<4>) -> Tensor<4> {
        let rows: Vec<i64> = self.places.iter().map(|place| *place as i64).collect();
        let rows = TensorData::new(rows, [self.places.len()]);
        let rows = Tensor::<1, Int>::from_data(rows, &own.device());
        unwrap_collective(tensors::all_gather(own, &self.group, Lane::InOrder))
            .wait()
            .select(0, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::Packed;

    #[test]
    fn ranks_read_every_token_once_and_all_have_as_many_rows() {
        for ranks in [2, 3, 8] {
            for lens in [vec![100], vec![3, 17, 1, 40], vec![2 * ranks + 1, 1]] {
                let packed = Packed::new(lens.iter().enumerate().map(|(i, len)| (i, 5 * i, *len)));
                let mut seen = vec![0; packed.num_tokens()];
                for rank in 0..ranks {
                    for Piece {
                        segment,
                        rows,
                        own,
                        start,
                    } in pieces(packed.segments(), rank, ranks)
                    {
                        assert_eq!(rows.len(), own.len());
                        let of = &packed.segments()[segment];
                        assert_eq!(start, of.start + rows.start - of.rows.start);
                        rows.for_each(|row| seen[row] += 1);
                    }
                }
                assert!(seen.iter().all(|times| *times == 1), "{lens:?} on {ranks}");
            }
        }
    }

    #[test]
    fn next_tokens_are_read_by_all() {
        let packed = Packed::new([(0, 7, 1), (1, 3, 1)]);
        assert!(PackedShare::of(packed.segments(), &Group::single(0)).is_none());
        let of_rank = |rank| num_rows(&pieces(packed.segments(), rank, 2));
        assert_eq!([of_rank(0), of_rank(1)], [2, 0]);
    }
}
