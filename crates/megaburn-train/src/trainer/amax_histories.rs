//! The largest magnitudes of the steps before, from which delayed scales are derived.

use std::collections::BTreeMap;

use crate::config::{AmaxCompute, PrecisionConfig};

/// For each matrix, steps of the run and its largest magnitudes in them, the oldest first.
pub(crate) type SavedAmaxes = BTreeMap<String, Vec<(u64, f32)>>;

/// The largest magnitudes of the matrices of the full model, over all micro-batches and ranks. Every
/// rank has all of them.
#[derive(Clone, Debug)]
pub(super) struct AmaxHistories {
    /// For each matrix, the steps that can still determine its scale, the oldest first.
    matrices: SavedAmaxes,
    len: u64,
    compute: AmaxCompute,
    /// The factor of the magnitudes that scales are derived from.
    factor: f32,
}

impl AmaxHistories {
    /// Histories without any step.
    pub(super) fn new(precision: &PrecisionConfig) -> Self {
        Self {
            matrices: SavedAmaxes::new(),
            len: precision.amax_history_len as u64,
            compute: precision.amax_compute,
            factor: (precision.margin as f32).exp2(),
        }
    }

    /// Histories with those steps of a checkpoint that the window reaches.
    #[must_use]
    pub(super) fn with(self, mut matrices: SavedAmaxes) -> Self {
        let last = matrices.values().flatten().map(|(step, _)| *step).max();
        let last = last.unwrap_or(0);
        for steps in matrices.values_mut() {
            steps.retain(|(step, _)| step + self.len > last);
        }
        Self { matrices, ..self }
    }

    /// Forgets all steps.
    pub(super) fn clear(&mut self) {
        self.matrices.clear();
    }

    /// What a checkpoint keeps.
    pub(super) fn saved(&self) -> SavedAmaxes {
        self.matrices.clone()
    }

    /// The histories of the matrices of those layers for which `keeps` is true.
    #[must_use]
    pub(super) fn of_layers(mut self, keeps: impl Fn(&str) -> bool) -> Self {
        let is_kept = |name: &str| name.rsplit_once('.').is_some_and(|(layer, _)| keeps(layer));
        self.matrices.retain(|name, _| is_kept(name));
        self
    }

    /// Adds a step with the largest magnitude of every matrix; the history of one that is missing is
    /// forgotten. Steps that can no longer determine a scale are dropped: too old ones, and those
    /// that are followed by one that is as large.
    pub(super) fn push<'a>(
        &mut self,
        step: u64,
        amaxes: impl IntoIterator<Item = (&'a String, f32)>,
    ) {
        let mut before = std::mem::take(&mut self.matrices);
        for (name, amax) in amaxes {
            let mut steps = before.remove(name).unwrap_or_default();
            steps.retain(|(of, earlier)| match self.compute {
                AmaxCompute::Max => of + self.len > step && *earlier > amax,
                AmaxCompute::MostRecent => false,
            });
            steps.push((step, amax));
            self.matrices.insert(name.clone(), steps);
        }
    }

    /// The factor of the magnitudes that scales are derived from.
    pub(super) fn factor(&self) -> f32 {
        self.factor
    }

    /// The largest magnitude of a matrix in the steps before `step` that still determine its scale
    /// after that step, 0 without any.
    pub(super) fn before(&self, name: &str, step: u64) -> f32 {
        let steps = self.matrices.get(name).into_iter().flatten();
        let counts = |of: u64| match self.compute {
            AmaxCompute::Max => of + self.len > step,
            AmaxCompute::MostRecent => false,
        };
        let steps = steps.filter(|(of, _)| counts(*of));
        steps.map(|(_, amax)| *amax).fold(0.0, f32::max)
    }

    /// The magnitude that the scale of a matrix is derived from; `None` if there is no step before,
    /// or the matrix was zero in all of them, which says nothing about the next one.
    pub(super) fn derived(&self, name: &str) -> Option<f32> {
        let steps = self.matrices.get(name)?.iter();
        let (_, amax) = match self.compute {
            AmaxCompute::Max => steps.max_by(|a, b| a.1.total_cmp(&b.1)),
            AmaxCompute::MostRecent => steps.last(),
        }?;
        (*amax > 0.0).then_some(amax * self.factor)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The magnitudes that scales are derived from are those of the full window, although only a few
    /// of its steps are kept.
    #[rstest]
    fn the_window_has_the_largest_of_its_steps(
        #[values(1, 2, 5)] len: usize,
        #[values(AmaxCompute::Max, AmaxCompute::MostRecent)] compute: AmaxCompute,
        #[values(0, 3)] margin: u32,
    ) {
        let mut histories = AmaxHistories::new(&PrecisionConfig {
            amax_history_len: len,
            amax_compute: compute,
            margin,
            ..PrecisionConfig::default()
        });
        let name = "matrix".to_string();
        assert_eq!(histories.derived(&name), None);
        let all = [3.0, 1.0, 2.0, 2.0, 0.5, 0.25, 0.125, 4.0, 0.0, 0.0, 1.0f32];
        for (index, amax) in all.into_iter().enumerate() {
            let before = histories.before(&name, index as u64 + 1);
            histories.push(index as u64 + 1, [(&name, amax)]);
            let next = before.max(amax) * histories.factor();
            assert_eq!(histories.derived(&name).unwrap_or(0.0), next);
            let window = &all[(index + 1).saturating_sub(len)..=index];
            let expected = match compute {
                AmaxCompute::Max => window.iter().copied().reduce(f32::max),
                AmaxCompute::MostRecent => window.last().copied(),
            };
            let expected = expected.filter(|amax| *amax > 0.0);
            let factor = 2.0f32.powi(margin as i32);
            assert_eq!(histories.derived(&name), expected.map(|amax| amax * factor));
            assert!(histories.saved()[&name].len() <= len);
        }
        let resumed = histories.clone().with(histories.saved());
        assert_eq!(resumed.derived(&name), histories.derived(&name));
        // A shorter window does not reach steps before it.
        let short = AmaxHistories {
            len: 1,
            ..histories.clone()
        };
        let resumed = short.with(histories.saved());
        assert_eq!(resumed.derived(&name), Some(2.0f32.powi(margin as i32)));
    }
}
