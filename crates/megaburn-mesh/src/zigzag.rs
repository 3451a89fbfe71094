use std::ops::Range;

/// The part of a sequence that a context-parallel rank holds: chunks `rank` and
/// `2 ranks - 1 - rank` of `2 ranks` equal chunks, which balances the work of causal attention over
/// the ranks.
///
/// ```
/// use megaburn_mesh::Zigzag;
///
/// let [first, last] = [Zigzag::new(0, 2), Zigzag::new(1, 2)];
/// assert_eq!(first.ranges(8), [0..2, 6..8]);
/// assert_eq!(last.ranges(8), [2..4, 4..6]);
/// ```
///
/// Source: Megatron-LM `megatron/core/utils.py`, `get_batch_on_this_cp_rank`; Brandon et al.
/// (2023), "Striped Attention", for the imbalance that it removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Zigzag {
    rank: usize,
    ranks: usize,
}

impl Zigzag {
    /// A single rank that holds the full sequence.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// The part of `rank`.
    ///
    /// # Panics
    /// If `rank` is not less than `ranks`.
    pub fn new(rank: usize, ranks: usize) -> Self {
        assert!(
            rank < ranks,
            "zigzag: rank {rank} must be less than {ranks}"
        );
        Self { rank, ranks }
    }

    /// The number of ranks that share a sequence.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// The number that the length of a sequence must be a multiple of.
    pub fn multiple(self) -> usize {
        if self.ranks == 1 { 1 } else { 2 * self.ranks }
    }

    /// The indices of the rank's two chunks, out of `2 ranks`.
    pub fn chunks(self) -> [usize; 2] {
        [self.rank, 2 * self.ranks - 1 - self.rank]
    }

    /// The ranges of its two chunks in a sequence of length `len`; for a single rank, the two
    /// halves.
    ///
    /// # Panics
    /// If the ranks cannot split the sequence evenly.
    pub fn ranges(self, len: usize) -> [Range<usize>; 2] {
        let multiple = self.multiple();
        assert!(
            len.is_multiple_of(multiple),
            "zigzag: {len} positions are not divisible by {multiple}"
        );
        if self.ranks == 1 {
            return [0..len / 2, len / 2..len];
        }
        self.chunks()
            .map(|chunk| chunk * (len / multiple)..(chunk + 1) * (len / multiple))
    }

    /// The positions that the rank holds in a sequence of length `len`, in order.
    ///
    /// # Panics
    /// See [`ranges`](Self::ranges).
    pub fn positions(self, len: usize) -> impl Iterator<Item = usize> {
        self.ranges(len).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_hold_every_position_once_in_two_stretches() {
        for ranks in 1..9 {
            for len in [0, 2 * ranks, 6 * ranks] {
                let all = (0..ranks).flat_map(|rank| Zigzag::new(rank, ranks).positions(len));
                let mut all: Vec<_> = all.collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..len), "{ranks} ranks, {len}");
            }
        }
        assert!(Zigzag::WHOLE.positions(5).eq(0..5));
        assert!(Zigzag::new(1, 3).positions(12).eq([2, 3, 8, 9]));
    }

    #[test]
    fn every_rank_has_as_many_causal_pairs() {
        let pairs = |rank| {
            Zigzag::new(rank, 4)
                .positions(32)
                .map(|at| at + 1)
                .sum::<usize>()
        };
        assert!((1..4).all(|rank| pairs(rank) == pairs(0)));
    }

    #[test]
    #[should_panic(expected = "zigzag: 10 positions are not divisible by 4")]
    fn a_sequence_that_does_not_divide_is_refused() {
        Zigzag::new(0, 2).ranges(10);
    }
}
