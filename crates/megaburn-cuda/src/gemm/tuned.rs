use std::collections::HashMap;

use super::key::Key;

/// The number of row counts per matrix that are timed individually, so that a run with one shape,
/// and its evaluation, get the fastest algorithms.
const EXACT: usize = 2;

/// The fastest algorithms found so far, keyed by product without its row count. Distributed
/// documents bring many row counts, and timing all of them would take longer than the steps do.
#[derive(Debug)]
pub(super) struct Tuned<A>(HashMap<(Key, [u32; 4]), Vec<Known<A>>>);

/// A row count, and the fastest algorithm for it.
type Known<A> = (usize, A);

impl<A> Default for Tuned<A> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<A: Copy> Tuned<A> {
    /// The algorithm of the nearest row count within a factor of 1.5, if enough row counts were
    /// timed.
    pub(super) fn near(&self, key: &Key, aligned: [u32; 4]) -> Option<A> {
        let rows = key.rows()?;
        let known = self
            .0
            .get(&(key.with_rows(0), aligned))
            .filter(|all| all.len() >= EXACT)?;
        let ratio = |of: usize| of.max(rows) as f64 / of.min(rows).max(1) as f64;
        let (near, algorithm) = known
            .iter()
            .min_by(|(a, _), (b, _)| ratio(*a).total_cmp(&ratio(*b)))?;
        (ratio(*near) <= 1.5).then_some(*algorithm)
    }

    pub(super) fn put(&mut self, key: &Key, aligned: [u32; 4], algorithm: A) {
        if let Some(rows) = key.rows() {
            self.0
                .entry((key.with_rows(0), aligned))
                .or_default()
                .push((rows, algorithm));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType::BF16;

    use super::*;
    use crate::tensor::MatrixView;

    fn key(m: usize, n: usize) -> Key {
        let view = |rows, cols| MatrixView::new(&[rows, cols], &[cols, 1]).unwrap();
        Key::new(
            [view(m, 48), view(48, n), view(m, n)],
            [BF16; 3],
            None,
            false,
            false,
        )
        .unwrap()
    }

    #[test]
    fn the_third_number_of_rows_asks_its_neighbour() {
        let mut tuned = Tuned::default();
        let aligned = [16; 4];
        for (rows, algorithm) in [(16384, 'a'), (1024, 'b')] {
            assert_eq!(tuned.near(&key(rows, 7), aligned), None);
            tuned.put(&key(rows, 7), aligned, algorithm);
        }
        assert_eq!(tuned.near(&key(11264, 7), aligned), Some('a'));
        assert_eq!(tuned.near(&key(24576, 7), aligned), Some('a'));
        assert_eq!(tuned.near(&key(768, 7), aligned), Some('b'));
        // Too far away; another matrix; another alignment.
        assert_eq!(tuned.near(&key(8192, 7), aligned), None);
        assert_eq!(tuned.near(&key(16384, 8), aligned), None);
        assert_eq!(tuned.near(&key(16384, 7), [2; 4]), None);
        tuned.put(&key(8192, 7), aligned, 'c');
        assert_eq!(tuned.near(&key(12288, 7), aligned), Some('a'));
        assert_eq!(tuned.near(&key(6000, 7), aligned), Some('c'));
    }
}
