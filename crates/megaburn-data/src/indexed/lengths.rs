use std::collections::BTreeMap;

/// How many documents have each length. It is exact, and its memory grows only with the square root
/// of the number of tokens, because lengths are counted once per different length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LengthHistogram {
    counts: BTreeMap<u64, u64>,
    num_documents: u64,
    num_tokens: u64,
}

impl LengthHistogram {
    /// Counts a document of `length` tokens.
    pub fn add(&mut self, length: u64) {
        *self.counts.entry(length).or_default() += 1;
        self.num_documents += 1;
        self.num_tokens += length;
    }

    /// Number of documents.
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// Number of tokens of all documents.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// The mean length; 0 without documents.
    pub fn mean(&self) -> f64 {
        self.num_tokens as f64 / self.num_documents.max(1) as f64
    }

    /// The smallest length that at least the fraction `q` of the documents do not exceed; 0 without
    /// documents. 0 gives the minimum, 0.5 the median, 1 the maximum.
    pub fn quantile(&self, q: f64) -> u64 {
        let rank = (q * self.num_documents as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (length, count) in &self.counts {
            seen += count;
            if seen >= rank {
                return *length;
            }
        }
        self.counts
            .last_key_value()
            .map_or(0, |(length, _)| *length)
    }

    /// Number of documents without tokens.
    pub fn num_empty(&self) -> u64 {
        self.counts.get(&0).copied().unwrap_or(0)
    }

    /// Numbers of documents in ranges whose bounds are powers of two: `(first, last, count)`, from
    /// the range of the shortest to that of the longest document. Empty documents have a range of
    /// their own.
    pub fn ranges(&self) -> Vec<(u64, u64, u64)> {
        let range_of = |length: u64| (u64::BITS - length.leading_zeros()) as usize;
        let mut counts = [0; u64::BITS as usize + 1];
        for (length, count) in &self.counts {
            counts[range_of(*length)] += count;
        }
        let mut keys = self.counts.keys();
        let (Some(shortest), longest) = (keys.next(), keys.next_back()) else {
            return Vec::new();
        };
        let (first, last) = (range_of(*shortest), range_of(*longest.unwrap_or(shortest)));
        let bounds = |range: usize| match range {
            0 => (0, 0),
            range => (1 << (range - 1), u64::MAX >> (u64::BITS as usize - range)),
        };
        let range = |range: usize| (bounds(range).0, bounds(range).1, counts[range]);
        (first..=last).map(range).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(lengths: &[u64]) -> LengthHistogram {
        let mut histogram = LengthHistogram::default();
        lengths.iter().for_each(|length| histogram.add(*length));
        histogram
    }

    #[test]
    fn ranges_are_powers_of_two() {
        let found = of(&[0, 0, 1, 2, 3, 9, 8]).ranges();
        let expected = [(0, 0, 2), (1, 1, 1), (2, 3, 2), (4, 7, 0), (8, 15, 2)];
        assert_eq!(found, expected);
        assert_eq!(of(&[5]).ranges(), [(4, 7, 1)]);
        assert_eq!(of(&[]).ranges(), []);
        assert_eq!(of(&[u64::MAX]).ranges(), [(1 << 63, u64::MAX, 1)]);
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_lengths(
            mut lengths in proptest::collection::vec(0u64..50, 1..60), q in 0.0f64..=1.0,
        ) {
            let histogram = of(&lengths);
            lengths.sort_unstable();
            let rank = ((q * lengths.len() as f64).ceil() as usize).max(1);
            prop_assert_eq!(histogram.quantile(q), lengths[rank - 1]);
            let total: u64 = histogram.ranges().iter().map(|(_, _, count)| count).sum();
            prop_assert_eq!(total, lengths.len() as u64);
            prop_assert_eq!(histogram.num_tokens(), lengths.iter().sum::<u64>());
        }
    }

    #[test]
    fn nothing_has_no_lengths() {
        let nothing = LengthHistogram::default();
        assert_eq!((nothing.quantile(0.5), nothing.mean()), (0, 0.0));
    }
}
