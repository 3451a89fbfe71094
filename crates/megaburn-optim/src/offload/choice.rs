use std::collections::BTreeSet;

/// Chooses the parameters whose optimizer state is kept in host memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct OffloadChoice {
    fraction: f64,
    paths: BTreeSet<String>,
}

impl OffloadChoice {
    /// No parameters are chosen yet; [`choose`](Self::choose) will choose this fraction of the
    /// elements.
    pub(super) fn new(fraction: f64) -> Self {
        Self {
            fraction,
            paths: BTreeSet::new(),
        }
    }

    /// Whether nothing is offloaded, whatever parameters there are.
    pub(super) fn is_none(&self) -> bool {
        self.fraction == 0.0
    }

    /// Chooses from `params`, pairs of path and kept elements in update order. The chosen elements
    /// are as close to the fraction as unsplit parameters allow, for every prefix of `params` too,
    /// so that copies of one parameter overlap the update of another.
    pub(super) fn choose<'a>(&mut self, params: impl IntoIterator<Item = (&'a str, usize)>) {
        self.paths.clear();
        let mut seen = 0.0;
        let mut chosen = 0.0;
        for (path, len) in params.into_iter().filter(|(_, len)| *len > 0) {
            let len = len as f64;
            seen += len;
            if chosen + len / 2.0 <= self.fraction * seen {
                chosen += len;
                self.paths.insert(path.to_string());
            }
        }
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.paths.contains(path)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chosen(fraction: f64, lens: &[usize]) -> Vec<bool> {
        let names: Vec<String> = (0..lens.len()).map(|i| i.to_string()).collect();
        let mut choice = OffloadChoice::new(fraction);
        choice.choose(names.iter().map(String::as_str).zip(lens.iter().copied()));
        names.iter().map(|name| choice.has(name)).collect()
    }

    #[test]
    fn a_half_of_equal_ones_is_every_other() {
        assert_eq!(chosen(0.5, &[7; 5]), [true, false, true, false, true]);
        assert_eq!(
            chosen(0.25, &[7; 6]),
            [false, true, false, false, false, true]
        );
        assert_eq!(chosen(0.5, &[0, 4, 0, 4]), [false, true, false, false]);
    }

    proptest! {
        #[test]
        fn the_first_few_are_within_half_a_parameter_of_the_fraction(
            lens in prop::collection::vec(0usize..10_000, 0..40),
            fraction in 0.0f64..=1.0,
        ) {
            let found = chosen(fraction, &lens);
            let largest = lens.iter().copied().max().unwrap_or(0) as f64;
            let (mut seen, mut sum) = (0.0, 0.0);
            for (len, is_chosen) in lens.iter().zip(&found) {
                prop_assert!(*len > 0 || !is_chosen);
                seen += *len as f64;
                sum += if *is_chosen { *len as f64 } else { 0.0 };
                let error = (sum - fraction * seen).abs();
                prop_assert!(error <= largest / 2.0 + 1e-6, "{error} of {largest}");
            }
        }

        #[test]
        fn none_are_none_and_all_are_all(lens in prop::collection::vec(0usize..1_000_000, 0..40)) {
            prop_assert!(chosen(0.0, &lens).iter().all(|is| !is));
            let found = chosen(1.0, &lens);
            prop_assert!(lens.iter().zip(found).all(|(len, is)| is == (*len > 0)));
        }
    }
}
