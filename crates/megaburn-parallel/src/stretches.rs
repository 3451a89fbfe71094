//! Where the rows of a rank are in the sequences that context parallelism splits.

use std::ops::Range;

/// Splits the `held` rows of two concatenated chunks into ranges of consecutive positions. Returns
/// each range, relative to the start of `held`, with the position of its first row.
pub(crate) fn stretches(
    chunks: [Range<usize>; 2],
    held: Range<usize>,
) -> Vec<(Range<usize>, usize)> {
    let [front, back] = chunks;
    if front.end == back.start {
        return vec![(0..held.len(), front.start + held.start)];
    }
    let both = [(0, front.clone()), (front.len(), back)];
    let stretch = |(before, chunk): (usize, Range<usize>)| {
        let rows = before.max(held.start)..(before + chunk.len()).min(held.end);
        let position = (chunk.start + rows.start).saturating_sub(before);
        (!rows.is_empty()).then(|| (rows.start - held.start..rows.end - held.start, position))
    };
    both.into_iter().filter_map(stretch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_at_their_positions() {
        // Two chunks of four tokens; sequence-parallel ranks hold some of them.
        let of = |held| stretches([4..8, 24..28], held);
        assert_eq!(of(0..8), [(0..4, 4), (4..8, 24)]);
        assert_eq!(of(0..4), [(0..4, 4)]);
        assert_eq!(of(2..6), [(0..2, 6), (2..4, 24)]);
        assert_eq!(of(6..8), [(0..2, 26)]);
        assert_eq!(stretches([0..4, 4..8], 2..6), [(0..4, 2)]);
        assert_eq!(stretches([4..8, 8..12], 2..6), [(0..4, 6)]);
    }
}
