//! Weights that data-parallel ranks send each other in FP8, `precision.fp8_param_gather`.

use std::collections::BTreeMap;

use megaburn_kernels::{MatrixRole, Scaling};
use megaburn_optim::{DelayedScale, Fp8Param};
use megaburn_parallel::QuantizedLayer;

use crate::{
    error::TrainError,
    trainer::{
        Trainer,
        precision_phases::{weight_of, without_expert},
    },
};

impl Trainer {
    /// Says which weights the update of the current step sends in FP8: those of layers that were
    /// quantised with one scale in this step and will be in the next one. After the last step, before
    /// a phase of the schedule and before a step that counts what layers lose, there are none: an
    /// evaluation, a generated text and the counts see the weights themselves then.
    pub(super) fn choose_fp8_params(&self) {
        if self.core.config.precision.fp8_param_gather {
            self.core.sharding.send_in_fp8(self.fp8_params());
        }
    }

    fn fp8_params(&self) -> BTreeMap<String, Fp8Param> {
        let next = self.core.progress.step + 2;
        let (phase, _) = self.core.config.precision.phase_at(next);
        let is_last = next > self.core.config.train.steps || phase != self.precision.current.0;
        if is_last || self.counts_losses(next) {
            return BTreeMap::new();
        }
        let held = self.precision.fallbacks.layers_at(phase, next);
        let is_held = |name: &str| {
            let group = without_expert(name);
            held.iter().any(|held| without_expert(held) == group)
        };
        let layers = self.own_layers().into_iter();
        let layers = layers.filter(|(name, _)| !is_held(name));
        layers
            .filter_map(|(name, layer)| {
                let param = self.fp8_param(&name, &layer)?;
                Some((weight_of(&name), param))
            })
            .collect()
    }

    /// How the weight of a layer is sent, if the layer quantises it with one scale.
    fn fp8_param(&self, name: &str, layer: &QuantizedLayer) -> Option<Fp8Param> {
        let precision = self.precision_of(name)?;
        if precision.recipe.scaling != Scaling::Tensor {
            return None;
        }
        let step = self.core.progress.step + 1;
        let delayed = precision.delayed.then(|| DelayedScale {
            current: layer.delayed(MatrixRole::Weight).current(),
            before: self.amax_histories.before(&weight_of(name), step),
            factor: self.amax_histories.factor(),
        });
        Some(Fp8Param {
            sent_amax: layer.sent_amax().clone(),
            reduction: layer.weight_reduction().cloned(),
            power_of_two: precision.recipe.power_of_two_scales,
            delayed,
        })
    }

    /// Sends weights in `train.dtype` that the last update sent in FP8: those of layers for which
    /// `is_wanted`.
    ///
    /// # Collective
    /// All data-parallel ranks, with the same layers; nothing is sent if none of them is in FP8.
    pub(super) fn send_in_full(
        &mut self,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<(), TrainError> {
        let of_layer = |path: &str| path.strip_suffix(".weight").is_some_and(&is_wanted);
        let in_fp8 =
            |name: &String| is_wanted(name) && self.core.sharding.is_in_fp8(&weight_of(name));
        if !self.own_layers().keys().any(in_fp8) {
            return Ok(());
        }
        let model = self.take_model();
        self.core.model = Some(self.core.optimizer.send_in_full(model, of_layer)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
