//! Ranks that are slower than the others of their kind.

use crate::facts::RankFacts;

/// A rank is an outlier if its rate is below this share of the median.
pub(super) const SHARE: f64 = 0.95;

/// A rank whose rate is far below the median of the ranks with the same kind of GPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outlier<'a> {
    pub(super) rank: &'a RankFacts,
    pub(super) rate: f64,
    pub(super) median: f64,
    /// The number of GPUs that the median is from.
    pub(super) of: usize,
}

impl Outlier<'_> {
    /// How far it is below the median.
    pub(super) fn percent_below(&self) -> f64 {
        100.0 * (1.0 - self.rate / self.median)
    }
}

/// The outliers among `rates`, each of which belongs to a rank and is one of a kind.
pub(super) fn outliers<'a>(rates: &[(&'a RankFacts, String, f64)]) -> Vec<Outlier<'a>> {
    let found = rates.iter().filter_map(|(rank, kind, rate)| {
        let same = rates.iter().filter(|(_, other, _)| other == kind);
        let mut values: Vec<f64> = same.map(|(_, _, rate)| *rate).collect();
        let median = median(&mut values)?;
        (*rate < SHARE * median).then_some(Outlier {
            rank,
            rate: *rate,
            median,
            of: values.len(),
        })
    });
    found.collect()
}

/// The median: of two values, the larger one, so that of two GPUs the slower one is named.
pub(super) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_a_kind_are_compared() {
        let ranks: Vec<RankFacts> = (0..6)
            .map(|rank| RankFacts {
                rank,
                ..RankFacts::default()
            })
            .collect();
        let rates = [700.0, 690.0, 640.0, 710.0, 300.0, 301.0];
        let kinds = ["h100", "h100", "h100", "h100", "a100", "a100"];
        let rates: Vec<_> = ranks
            .iter()
            .zip(kinds.iter().zip(rates))
            .map(|(rank, (kind, rate))| (rank, kind.to_string(), rate))
            .collect();
        let found = outliers(&rates);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].rank.rank, found[0].median, found[0].of),
            (2, 700.0, 4)
        );
        assert!((found[0].percent_below() - 8.571).abs() < 0.01);
        assert_eq!(median(&mut [1.0, 2.0]), Some(2.0));
        assert_eq!(median(&mut []), None);
    }
}
