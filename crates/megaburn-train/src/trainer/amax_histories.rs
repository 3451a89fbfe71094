//! The largest magnitudes of the steps before, from which delayed scales are derived.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::Tensor;
use megaburn_collective::objects;
use megaburn_kernels::DelayedAmax;
use megaburn_parallel::delayed_amaxes;

use crate::{
    config::{AmaxCompute, PrecisionConfig, PrecisionRecipe},
    error::TrainError,
    trainer::{Trainer, stats::world_max},
};

/// The largest magnitudes of the matrices of the full model, over all micro-batches and ranks. Every
/// rank has all of them.
#[derive(Clone, Debug, Default)]
pub(super) struct AmaxHistories {
    /// For each matrix, the steps that can still determine its scale, the oldest first.
    matrices: SavedAmaxes,
    /// The matrices of all ranks, once they are known.
    names: Option<Vec<String>>,
}

/// For each matrix, steps of the run and its largest magnitudes in them, the oldest first.
pub(crate) type SavedAmaxes = BTreeMap<String, Vec<(u64, f32)>>;

impl Trainer {
    /// Ends a step of delayed scaling: the scales of the next step are derived from the largest
    /// magnitudes of this one and those before. A step without an update changes no scale, because
    /// its magnitudes may be those of an overflow.
    ///
    /// Source: Transformer Engine, `FP8GlobalStateManager.reduce_and_update_fp8_tensors`.
    ///
    /// # Collective
    /// All ranks with delayed scaling: one number per matrix, and the names of matrices at the
    /// first call.
    pub(super) fn advance_scales(&mut self, is_update: bool) -> Result<(), TrainError> {
        if self.config.precision.recipe != PrecisionRecipe::Delayed {
            return Ok(());
        }
        let own = delayed_amaxes(self.model_in_flight());
        let current = self.take_amaxes(&own)?;
        if !is_update {
            return Ok(());
        }
        let names = self.names_of_matrices(own.keys())?;
        let of = |name: &String| f64::from(current.get(name).copied().unwrap_or(0.0));
        let all = world_max(&self.groups, &names.iter().map(of).collect::<Vec<_>>())?;
        let step = self.progress.step;
        let mut matrices = std::mem::take(&mut self.amax_histories.matrices);
        self.amax_histories.matrices = names
            .iter()
            .zip(all)
            .map(|(name, amax)| {
                let mut steps = matrices.remove(name).unwrap_or_default();
                push(&mut steps, step, amax as f32, &self.config.precision);
                (name.clone(), steps)
            })
            .collect();
        self.amax_histories.names = Some(names);
        self.derive_scales(&own);
        Ok(())
    }

    /// Discards the magnitudes of a step that ended in an error.
    pub(super) fn discard_amaxes(&self) {
        for amax in delayed_amaxes(self.model_in_flight()).values() {
            amax.take_current();
        }
    }

    /// The magnitudes that a checkpoint keeps.
    pub(super) fn saved_amaxes(&self) -> SavedAmaxes {
        self.amax_histories.matrices.clone()
    }

    /// Continues with the magnitudes of a checkpoint.
    pub(super) fn resume_amaxes(&mut self, saved: SavedAmaxes) {
        if self.config.precision.recipe == PrecisionRecipe::Delayed {
            self.amax_histories.matrices = saved;
            self.derive_scales(&delayed_amaxes(self.model_in_flight()));
        }
    }

    /// The largest magnitudes of this rank's matrices in the step.
    fn take_amaxes(
        &self,
        own: &BTreeMap<String, DelayedAmax>,
    ) -> Result<BTreeMap<String, f32>, TrainError> {
        let taken = own
            .iter()
            .filter_map(|(name, amax)| Some((name.clone(), amax.take_current()?)));
        let (names, amaxes): (Vec<String>, Vec<Tensor<1>>) = taken.unzip();
        if names.is_empty() {
            return Ok(BTreeMap::new());
        }
        // One read instead of one per matrix.
        let data = Tensor::cat(amaxes, 0).try_into_data();
        let data = data.map_err(|error| TrainError::Device {
            why: error.to_string(),
        })?;
        Ok(names.into_iter().zip(data.iter::<f32>()).collect())
    }

    /// The names of the matrices of all ranks, of which pipeline stages have different ones.
    fn names_of_matrices<'a>(
        &self,
        own: impl Iterator<Item = &'a String>,
    ) -> Result<Vec<String>, TrainError> {
        if let Some(names) = &self.amax_histories.names {
            return Ok(names.clone());
        }
        let own: Vec<String> = own.cloned().collect();
        let world = &self.groups.world;
        let all = objects::gather(world, &own)?;
        let all: BTreeSet<String> = all.into_iter().flatten().collect();
        Ok(objects::broadcast(world, &Vec::from_iter(all))?)
    }

    /// Gives this rank's matrices the magnitudes that their scales are derived from.
    fn derive_scales(&self, own: &BTreeMap<String, DelayedAmax>) {
        let precision = &self.config.precision;
        let factor = (precision.margin as f32).exp2();
        let derived = own.iter().filter_map(|(name, amax)| {
            let steps = self.amax_histories.matrices.get(name)?;
            Some((amax, derived(steps, precision)? * factor))
        });
        let (amaxes, values): (Vec<&DelayedAmax>, Vec<f32>) = derived.unzip();
        if amaxes.is_empty() {
            return;
        }
        let device = self.device.clone().inner();
        let values = Tensor::<1>::from_floats(values.as_slice(), &device);
        for (index, amax) in amaxes.into_iter().enumerate() {
            amax.set_derived(Some(values.clone().narrow(0, index, 1)));
        }
    }
}

/// Adds a step, and drops those that can no longer determine a scale: too old, or followed by one
/// that is as large.
fn push(steps: &mut Vec<(u64, f32)>, step: u64, amax: f32, precision: &PrecisionConfig) {
    let len = precision.amax_history_len as u64;
    steps.retain(|(of, before)| match precision.amax_compute {
        AmaxCompute::Max => of + len > step && *before > amax,
        AmaxCompute::MostRecent => false,
    });
    steps.push((step, amax));
}

/// The magnitude that a scale is derived from.
fn derived(steps: &[(u64, f32)], precision: &PrecisionConfig) -> Option<f32> {
    let (_, amax) = match precision.amax_compute {
        AmaxCompute::Max => steps.iter().max_by(|a, b| a.1.total_cmp(&b.1)),
        AmaxCompute::MostRecent => steps.last(),
    }?;
    Some(*amax)
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
    ) {
        let precision = PrecisionConfig {
            amax_history_len: len,
            amax_compute: compute,
            ..PrecisionConfig::default()
        };
        let all = [3.0, 1.0, 2.0, 2.0, 0.5, 0.25, 0.125, 4.0, 0.0, 1.0f32];
        let mut steps = Vec::new();
        for (index, amax) in all.into_iter().enumerate() {
            push(&mut steps, index as u64 + 1, amax, &precision);
            let window = &all[(index + 1).saturating_sub(len)..=index];
            let expected = match compute {
                AmaxCompute::Max => window.iter().copied().reduce(f32::max),
                AmaxCompute::MostRecent => window.last().copied(),
            };
            assert_eq!(derived(&steps, &precision), expected);
            assert!(steps.len() <= len);
        }
    }
}
