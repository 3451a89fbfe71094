//! A shuffle that does not store the permuted list.

use megaburn_mesh::PositionRng;

/// Rounds of the Feistel network. Four already look random (Luby and Rackoff 1988); small sets need
/// more.
const ROUNDS: u64 = 8;

/// A permutation of `0..n` that is computed on demand: constant memory, and constant expected time
/// per index, for any `n`.
///
/// It is a Feistel network over the pairs `(l, r)` of a grid `a x b` with `a = ceil(sqrt n)` and
/// `b = ceil(n / a)`; its rounds are keyed by a [`PositionRng`]. Each round adds a function of one
/// half to the other half, which is invertible, so the network is a bijection of the grid.
///
/// The grid has fewer than `a` places outside `0..n`. A result outside `0..n` is passed through the
/// network repeatedly until it falls inside (cycle walking: Black and Rogaway, "Ciphers with
/// arbitrary finite domains", CT-RSA 2002).
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    a: u64,
    b: u64,
    rng: PositionRng,
}

impl Permutation {
    /// The permutation of `0..n` that is keyed by `rng`; `n` must be below 2^62.
    pub fn new(n: u64, rng: PositionRng) -> Self {
        assert!(n < 1 << 62, "a permutation of {n} elements is too large");
        let root = n.isqrt();
        let a = (root + u64::from(root * root < n)).max(1);
        Self {
            n,
            a,
            b: n.div_ceil(a),
            rng,
        }
    }

    /// The image of `index` under the permutation.
    ///
    /// # Panics
    /// If `index` is not below `n`.
    pub fn at(&self, index: u64) -> u64 {
        assert!(
            index < self.n,
            "index {index} must be less than {}, the length of the permutation",
            self.n
        );
        let mut place = self.network(index);
        // Terminates: the network permutes the grid, so the cycle returns to `index` at the latest.
        while place >= self.n {
            place = self.network(place);
        }
        place
    }

    fn network(&self, place: u64) -> u64 {
        let mut l = place / self.b;
        let mut r = place % self.b;
        for round in 0..ROUNDS {
            if round % 2 == 0 {
                l = (l + self.rng.below(r * ROUNDS + round, self.a)) % self.a;
            } else {
                r = (r + self.rng.below(l * ROUNDS + round, self.b)) % self.b;
            }
        }
        l * self.b + r
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use megaburn_mesh::Purpose;
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn permutation(n: u64, seed: u64) -> Permutation {
        Permutation::new(n, PositionRng::new(seed, Purpose::DataOrder, "test"))
    }

    fn is_bijection(n: u64, seed: u64) -> bool {
        let p = permutation(n, seed);
        let mut seen = vec![false; n as usize];
        (0..n).for_each(|i| seen[p.at(i) as usize] = true);
        seen.into_iter().all(|s| s)
    }

    #[rstest]
    fn every_place_is_taken_once(
        #[values(
            1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 97, 100, 101, 1024, 1031, 4096, 9973
        )]
        n: u64,
        #[values(0, 1, u64::MAX)] seed: u64,
    ) {
        assert!(is_bijection(n, seed));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_place_is_taken_once_for_any_n(n in 1u64..3000, seed: u64) {
            prop_assert!(is_bijection(n, seed));
        }

        #[test]
        fn large_sets_stay_in_range_without_collisions(
            n in (1u64 << 33)..(1 << 61), start: u64, seed: u64
        ) {
            let p = permutation(n, seed);
            let start = start % (n - 1000);
            let places: BTreeSet<u64> = (start..start + 200).map(|i| p.at(i)).collect();
            prop_assert_eq!(places.len(), 200);
            prop_assert!(places.iter().all(|&x| x < n));
        }
    }

    #[test]
    fn a_place_goes_anywhere_with_equal_chance() {
        for n in [5u64, 12, 30] {
            let mut counts = vec![vec![0f64; n as usize]; n as usize];
            let trials = 3000;
            for seed in 0..trials {
                let p = permutation(n, seed);
                (0..n).for_each(|i| counts[i as usize][p.at(i) as usize] += 1.0);
            }
            let expected = trials as f64 / n as f64;
            for row in &counts {
                let chi2: f64 = row.iter().map(|c| (c - expected).powi(2) / expected).sum();
                // chi2 has mean n - 1 and standard deviation sqrt(2 (n - 1)); allow six standard
                // deviations.
                let limit = (n - 1) as f64 + 6.0 * (2.0 * (n - 1) as f64).sqrt();
                assert!(chi2 < limit, "n {n}: chi2 {chi2} over {limit}");
            }
        }
    }

    #[test]
    fn neighbours_are_torn_apart() {
        let n = 10_000;
        let p = permutation(10_000, 3);
        let near = (1..n)
            .filter(|&i| p.at(i).abs_diff(p.at(i - 1)) < 100)
            .count();
        assert!(
            near < 400,
            "{near} of 10000 neighbours stay within 1% (200 by chance)"
        );
    }
}
