//! Row-major indices of a shard's pieces.

use std::ops::Range;

use megaburn_mesh::{ShardPiece, ShardSpec};

/// Where the elements of a piece of a shard are in the flattened local tensor. The piece is a slice
/// along one dimension; its own elements are numbered in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceIndex {
    rows: usize,
    /// Elements per row of the piece.
    row: usize,
    /// Elements per row of the local tensor.
    local_row: usize,
    /// The first element of the piece in each row of the local tensor.
    local_start: usize,
}

impl PieceIndex {
    pub(crate) fn new(shard: &ShardSpec, piece: &ShardPiece) -> Self {
        let shape = &shard.global_shape;
        let rows = shape[..shard.dim.min(shape.len())].iter().product();
        let inner: usize = shape.iter().skip(shard.dim + 1).product();
        Self {
            rows,
            row: piece.local.len() * inner,
            local_row: shard.local_len * inner,
            local_start: piece.local.start * inner,
        }
    }

    /// Number of elements of the piece.
    pub(crate) fn len(&self) -> usize {
        self.rows * self.row
    }

    /// The elements of the piece that lie in the range `local` of the flattened local tensor, as a
    /// range of the piece.
    pub(crate) fn within(&self, local: &Range<usize>) -> Range<usize> {
        if self.len() == 0 {
            return 0..0;
        }
        // Elements of the piece before a local index.
        let before = |index: usize| {
            let (row, column) = (index / self.local_row, index % self.local_row);
            let in_row = column.saturating_sub(self.local_start).min(self.row);
            (row * self.row + in_row).min(self.len())
        };
        before(local.start)..before(local.end)
    }

    /// The smallest range of the flattened local tensor that holds the elements `range` of the
    /// piece, which must not be empty.
    pub(crate) fn hull(&self, range: &Range<usize>) -> Range<usize> {
        self.local(range.start)..self.local(range.end - 1) + 1
    }

    /// Calls `f(local index, length)` for each contiguous run of the elements `range` of the piece.
    pub(crate) fn for_each_run(&self, range: Range<usize>, mut f: impl FnMut(usize, usize)) {
        let mut at = range.start;
        while at < range.end {
            let len = (self.row - at % self.row).min(range.end - at);
            f(self.local(at), len);
            at += len;
        }
    }

    /// The index in the flattened local tensor of an element of the piece.
    fn local(&self, element: usize) -> usize {
        element / self.row * self.local_row + self.local_start + element % self.row
    }
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::{Axis, FusedPart};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any range of a fused, split tensor holds the elements of each piece that a walk over all
        /// runs finds there.
        #[test]
        fn pieces_within_a_range_are_those_of_a_walk(
            (outer, inner) in (1usize..4, 1usize..4),
            parts in prop::collection::vec(1usize..4, 1..4),
            (dim, ranks) in (0usize..3, 1usize..4),
            (from, to) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let parts: Vec<_> = parts.into_iter().map(|units| FusedPart::new(units * ranks)).collect();
            let size: usize = parts.iter().map(FusedPart::size).sum();
            let mut shape = vec![outer, inner, 2];
            shape[dim] = size;
            let shard = ShardSpec::split(&shape, dim, &parts, Axis::Tp, ranks - 1, ranks).unwrap();
            let num_local: usize = shard.local_shape().iter().product();
            let (a, b) = (from.index(num_local + 1), to.index(num_local + 1));
            let range = a.min(b)..a.max(b);
            for piece in &shard.pieces {
                let mut walked = Vec::new();
                shard.for_each_run(piece, |local, _, len| walked.extend(local..local + len));
                let index = PieceIndex::new(&shard, piece);
                prop_assert_eq!(index.len(), walked.len());
                let within = index.within(&range);
                let expected: Vec<_> = walked.iter().copied().filter(|at| range.contains(at)).collect();
                prop_assert_eq!(&walked[within.clone()], &expected[..]);
                let mut found = Vec::new();
                index.for_each_run(within.clone(), |local, len| found.extend(local..local + len));
                prop_assert_eq!(&found, &expected);
                if let (Some(first), Some(last)) = (expected.first(), expected.last()) {
                    prop_assert_eq!(index.hull(&within), *first..last + 1);
                }
            }
        }
    }
}
