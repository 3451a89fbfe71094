//! The end of a step of delayed scaling.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::Tensor;
use megaburn_kernels::{DelayedAmax, MatrixRole};
use megaburn_parallel::QuantizedLayer;

use crate::{
    error::TrainError,
    trainer::{Trainer, amax_histories::SavedAmaxes, quantization_counts::MATRICES},
    trainer_core::world_max,
};

/// How the matrices whose largest magnitudes a checkpoint has differ from those of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResumedAmaxes {
    /// The number of matrices of the checkpoint that the run does not scale by them.
    pub dropped: usize,
    /// The number of matrices of the run that the checkpoint does not have.
    pub missing: usize,
}

impl Trainer {
    /// Ends a step of delayed scaling: the scales of the next step are derived from the largest
    /// magnitudes of this one and those before. A step without an update changes no scale, because
    /// its magnitudes may be those of an overflow. A matrix that was not quantised has no history.
    ///
    /// Source: Transformer Engine, `FP8GlobalStateManager.reduce_and_update_fp8_tensors`.
    ///
    /// # Collective
    /// All ranks with delayed scaling: one number per matrix, and the names of layers at the
    /// first call.
    pub(super) fn advance_scales(&mut self, is_update: bool) -> Result<(), TrainError> {
        if !self.delays_scales() {
            return Ok(());
        }
        let own = self.delayed_amaxes();
        let current = take_amaxes(&own)?;
        if !is_update {
            return Ok(());
        }
        let layers = self.names_of_layers()?;
        let quantized = layers.iter().filter(|it| self.precision_of(it).is_some());
        let matrices: Vec<(String, MatrixRole)> =
            quantized.flat_map(|it| matrices_of(it)).collect();
        let of = |name: &String| f64::from(current.get(name).copied().unwrap_or(0.0));
        let own: Vec<f64> = matrices.iter().map(|(name, _)| of(name)).collect();
        let all = world_max(&self.core.groups, &own)?;
        let amax = |(amax, (_, role)): (f64, &(_, MatrixRole))| (amax / self.unit_of(*role)) as f32;
        let all: Vec<f32> = all.into_iter().zip(&matrices).map(amax).collect();
        let names = matrices.iter().map(|(name, _)| name);
        self.amax_histories
            .push(self.core.progress.step, names.zip(all));
        self.derive_scales();
        Ok(())
    }

    /// Discards the magnitudes of a step that ended in an error.
    pub(super) fn discard_amaxes(&self) {
        if self.delays_scales() {
            let own = self.delayed_amaxes();
            own.values().for_each(|(_, amax)| drop(amax.take_current()));
        }
    }

    /// Continues with the magnitudes of a checkpoint, those of the matrices of this run.
    ///
    /// # Collective
    /// All ranks with delayed scaling: the names of layers.
    pub(super) fn resume_amaxes(
        &mut self,
        mut saved: SavedAmaxes,
    ) -> Result<ResumedAmaxes, TrainError> {
        let of_checkpoint = saved.len();
        if !self.delays_scales() {
            return Ok(ResumedAmaxes {
                dropped: of_checkpoint,
                missing: 0,
            });
        }
        let layers = self.names_of_layers()?;
        let quantized = layers.iter().filter(|it| self.precision_of(it).is_some());
        let used: BTreeSet<String> = quantized
            .flat_map(|it| matrices_of(it).map(|(name, _)| name))
            .collect();
        saved.retain(|name, _| used.contains(name));
        let resumed = ResumedAmaxes {
            dropped: of_checkpoint - saved.len(),
            missing: used.iter().filter(|it| !saved.contains_key(*it)).count(),
        };
        self.amax_histories = self.amax_histories.clone().with(saved);
        self.derive_scales();
        Ok(resumed)
    }

    /// Begins a step whose loss is multiplied by a factor. The magnitudes of gradients in the
    /// history are those without it.
    pub(super) fn begin_scales(&mut self, loss_factor: f64) {
        if self.loss_factor != loss_factor {
            self.loss_factor = loss_factor;
            self.derive_scales();
        }
    }

    /// The factor of the magnitudes of a matrix in the current step.
    pub(super) fn unit_of(&self, role: MatrixRole) -> f64 {
        match role {
            MatrixRole::Gradient => self.loss_factor,
            MatrixRole::Input | MatrixRole::Weight => 1.0,
        }
    }

    /// Gives this rank's matrices the magnitudes that their scales are derived from, if scales are
    /// delayed.
    pub(super) fn derive_scales(&self) {
        if !self.delays_scales() {
            return;
        }
        let mut values = Vec::new();
        let mut amaxes = Vec::new();
        for (name, (role, amax)) in self.delayed_amaxes() {
            match self.amax_histories.derived(&name) {
                Some(derived) => {
                    values.push((f64::from(derived) * self.unit_of(role)) as f32);
                    amaxes.push(amax);
                }
                None => amax.set_derived(None),
            }
        }
        if amaxes.is_empty() {
            return;
        }
        let device = self.core.device.clone().inner();
        let values = Tensor::<1>::from_floats(values.as_slice(), &device);
        for (index, amax) in amaxes.into_iter().enumerate() {
            amax.set_derived(Some(values.clone().narrow(0, index, 1)));
        }
    }

    /// This rank's matrices whose scales are delayed, by the name of the layer and of the matrix.
    fn delayed_amaxes(&self) -> OwnAmaxes {
        let layers = self.own_layers().into_iter();
        let quantized = layers.filter(|(name, _)| self.precision_of(name).is_some());
        let of = |(name, role), layer: &QuantizedLayer| (name, (role, layer.delayed(role).clone()));
        quantized
            .flat_map(|(name, layer)| matrices_of(&name).map(|matrix| of(matrix, &layer)))
            .collect()
    }
}

type OwnAmaxes = BTreeMap<String, (MatrixRole, DelayedAmax)>;

/// The names of a layer's matrices.
fn matrices_of(layer: &str) -> [(String, MatrixRole); 3] {
    MATRICES.map(|(role, matrix)| (format!("{layer}.{matrix}"), role))
}

/// The largest magnitudes of this rank's matrices in the step. They are read at once, not one by one.
fn take_amaxes(own: &OwnAmaxes) -> Result<BTreeMap<String, f32>, TrainError> {
    let taken = own
        .iter()
        .filter_map(|(name, (_, amax))| Some((name.clone(), amax.take_current()?)));
    let (names, amaxes): (Vec<String>, Vec<Tensor<1>>) = taken.unzip();
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let data = Tensor::cat(amaxes, 0).try_into_data();
    let data = data.map_err(|error| TrainError::Device {
        why: error.to_string(),
    })?;
    Ok(names.into_iter().zip(data.iter::<f32>()).collect())
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use megaburn_parallel::read_params;
    use rstest::rstest;

    use super::*;
    use crate::trainer::testing::{poison, trainers};

    /// A number that is not finite ends the step with its error, whatever the scale; nothing has
    /// changed, neither weights nor the history that scales are derived from.
    #[rstest]
    #[case("tensorwise", "tp2")]
    #[case("delayed", "tp2-sp")]
    #[case("delayed", "pp2")]
    #[case("blockwise", "tp1")]
    #[case("mxfp8", "dp2")]
    #[case("nvfp4", "dp2")]
    fn what_is_not_finite_changes_nothing(
        #[case] recipe: &str,
        #[case] layout: &str,
        #[values(f32::NAN, f32::INFINITY)] value: f32,
    ) {
        let recipe = format!("precision.recipe={recipe}");
        trainers(&[&recipe], layout, |mut trainer| {
            trainer.step()?;
            trainer.step()?;
            let param = "blocks.1.mlp.down.weight";
            let is_last = trainer.core.groups.world.rank() + 1 == trainer.core.groups.world.size();
            if is_last {
                poison(&mut trainer, param, value);
            }
            let weights = |trainer: &Trainer| -> Vec<(String, TensorData)> {
                read_params(trainer.model()).into_iter().collect()
            };
            let bytes = |all: Vec<(String, TensorData)>| -> Vec<Vec<u8>> {
                let bytes = |(_, data): (String, TensorData)| data.as_bytes().to_vec();
                all.into_iter().map(bytes).collect()
            };
            let before = (bytes(weights(&trainer)), trainer.amax_histories.saved());
            let error = trainer.step().unwrap_err();
            assert!(
                matches!(error, TrainError::NonFinite { step: 3, .. }),
                "{error}"
            );
            let after = (bytes(weights(&trainer)), trainer.amax_histories.saved());
            assert!(before == after, "{recipe} {layout}");
            Ok(())
        });
    }

    /// The magnitudes of gradients are those without the loss scale.
    #[test]
    fn another_loss_scale_changes_no_magnitude() {
        let saved = |loss_scale: &str| {
            let loss_scale = format!("optimizer.initial_loss_scale={loss_scale}");
            let sets = ["precision.recipe=delayed", "train.dtype=f16", &loss_scale];
            let mut ranks = trainers(&sets, "tp1", |mut trainer| {
                assert!(!trainer.step()?.skipped);
                Ok(trainer.amax_histories.saved())
            });
            ranks.remove(0)
        };
        let [small, large] = [saved("256"), saved("4096")];
        assert!(small.keys().any(|name| name.ends_with(".gradient")));
        for ((name, a), (_, b)) in small.iter().zip(&large) {
            let apart = (a[0].1 / b[0].1 - 1.0).abs();
            assert!(apart < 0.05, "{name}: {a:?} {b:?}");
        }
    }

    /// Steps that overflow are not in the history.
    #[test]
    fn an_overflow_is_not_recorded() {
        let sets = [
            "precision.recipe=delayed",
            "train.dtype=f16",
            "optimizer.initial_loss_scale=1e30",
            "optimizer.hysteresis=1",
        ];
        trainers(&sets, "tp2", |mut trainer| {
            assert!(trainer.step()?.skipped);
            assert!(trainer.amax_histories.saved().is_empty());
            while trainer.step()?.skipped {
                assert!(trainer.amax_histories.saved().is_empty());
            }
            let saved = trainer.amax_histories.saved();
            // Two layers of four matrices with three operands each.
            assert_eq!(saved.len(), 2 * 4 * 3);
            for (name, steps) in saved {
                assert_eq!(steps.len(), 1, "{name}");
                assert!(steps[0].1.is_finite() && steps[0].1 > 0.0, "{name}");
            }
            Ok(())
        });
    }

    /// Gathering shards of the sequence in FP8 changes no number, and no magnitude that is recorded.
    #[rstest]
    fn gathers_in_fp8_change_no_bit(#[values("tensorwise", "delayed")] recipe: &str) {
        let recipe = format!("precision.recipe={recipe}");
        let run = |gather: &str| {
            let sets = [&recipe, gather, "recompute.modules=[\"norm\"]"];
            trainers(&sets, "tp2-sp", |mut trainer| {
                let mut steps = Vec::new();
                for _ in 0..3 {
                    let step = trainer.step()?;
                    steps.push([step.loss, step.grad_norm].map(f64::to_bits));
                }
                Ok((steps, trainer.amax_histories.saved()))
            })
        };
        let [found, expected] =
            ["true", "false"].map(|on| run(&format!("precision.fp8_sequence_gather={on}")));
        assert_eq!(found, expected);
        let has_history = expected.iter().all(|(_, saved)| !saved.is_empty());
        assert_eq!(has_history, recipe.ends_with("delayed"));
    }
}
