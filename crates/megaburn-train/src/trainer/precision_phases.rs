//! Sets the precision of each layer before each step, by the schedule and by what falls back.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_collective::objects;
use megaburn_parallel::{LinearPrecision, QuantizedLayer, quantized_layers};
use megaburn_report::metrics::PrecisionMetrics;

use crate::{
    config::{PrecisionConfig, PrecisionRecipe},
    error::TrainError,
    precision_line::HeldLayers,
    trainer::{
        Trainer,
        precision_fallback::{Fallbacks, StepFindings},
    },
};

impl Trainer {
    /// Begins the next step: sets the precision of layers if it is another one than before, and
    /// whether what they lose is counted.
    ///
    /// # Collective
    /// As [`send_in_full`](Self::send_in_full), for layers that fall back.
    pub(super) fn begin_precision(&mut self) -> Result<(), TrainError> {
        let step = self.core.progress.step + 1;
        self.set_precision(step)?;
        self.begin_counts(self.counts_losses(step));
        Ok(())
    }

    /// Sets the precision of layers to that of a step. Histories of delayed scaling begin with the
    /// phase, and those of layers that fall back end.
    fn set_precision(&mut self, step: u64) -> Result<(), TrainError> {
        let phase = self.core.config.precision.phase_at(step);
        let held = self.precision.fallbacks.layers_at(phase.0, step);
        let is_other_phase = phase.0 != self.precision.current.0;
        if !is_other_phase && held == self.precision.held {
            return Ok(());
        }
        self.precision.current = phase;
        self.precision.held = held;
        if is_other_phase {
            self.amax_histories.clear();
        }
        let histories = self.amax_histories.clone();
        self.amax_histories = histories.of_layers(|layer| self.precision_of(layer).is_some());
        self.set_layers();
        self.derive_scales();
        let full: Vec<String> = self
            .own_layers()
            .into_keys()
            .filter(|layer| self.precision_of(layer).is_none())
            .collect();
        self.send_in_full(|layer| full.iter().any(|full| full == layer))
    }

    /// Sets the precision of this rank's layers to the current one.
    fn set_layers(&self) {
        for (name, layer) in self.own_layers() {
            layer.set(self.precision_of(&name));
        }
    }

    /// Begins a run, whose model was built for all phases.
    pub(super) fn begin_first_phase(&self) {
        if !self.core.config.precision.schedule.is_empty() {
            self.set_layers();
        }
    }

    /// Continues with the state of a checkpoint. Evaluations in between use the precision of the last
    /// step.
    ///
    /// # Collective
    /// As [`begin_precision`](Self::begin_precision).
    pub(super) fn resume_precision(&mut self, saved: Fallbacks) -> Result<(), TrainError> {
        self.precision.fallbacks = saved.resumed(&self.core.config.precision.fallback);
        self.set_precision(self.core.progress.step.max(1))
    }

    /// The precision of a layer of the full model in the current step; `None` if it is not quantised.
    pub(super) fn precision_of(&self, layer: &str) -> Option<LinearPrecision> {
        let group = without_expert(layer);
        let mut held = self.precision.held.iter();
        if held.any(|held| without_expert(held) == group) {
            return None;
        }
        let mut path = layer.split('.').skip_while(|part| *part != "blocks");
        let block = path.nth(1).and_then(|index| index.parse().ok())?;
        let (_, phase) = &self.precision.current;
        phase.of_model().of_block(block, self.model_config.layers)
    }

    /// Whether scales are delayed in the current step.
    pub(super) fn delays_scales(&self) -> bool {
        self.precision.current.1.recipe == PrecisionRecipe::Delayed
    }

    /// The layers that will have fallen back in the next step.
    pub(crate) fn held_layers(&self) -> Option<HeldLayers> {
        let step = self.core.progress.step + 1;
        let (phase, _) = self.core.config.precision.phase_at(step);
        self.precision.fallbacks.summary(phase, step)
    }

    /// Ends a step: reads what its layers lost, if that was counted, and decides which layers fall
    /// back. `loss` is the same on all ranks, and `None` if loss or gradient is not finite: such a
    /// step decides nothing.
    ///
    /// # Collective
    /// All ranks, if what layers lost was counted or can make them fall back: fifteen numbers per
    /// layer, and the names of layers at the first call.
    pub(super) fn end_precision(
        &mut self,
        is_update: bool,
        loss: Option<f64>,
    ) -> Result<Option<PrecisionMetrics>, TrainError> {
        let config = self.core.config.clone();
        let precision = &config.precision;
        let step = self.core.progress.step;
        let (phase, PrecisionConfig { recipe, .. }) = &self.precision.current;
        let (phase, recipe) = (*phase, recipe.to_string());
        let counted = self.counts_losses(step);
        let layers = counted.then(|| self.read_counts()).transpose()?;
        let mut metrics = PrecisionMetrics {
            recipe,
            ..PrecisionMetrics::default()
        };
        if precision.fallback.is_set() {
            let quantized: Vec<String> = self
                .names_of_layers()?
                .iter()
                .filter(|name| self.precision_of(name).is_some())
                .cloned()
                .collect();
            let measured = layers.as_ref().filter(|_| self.checks_bounds(step));
            let fallbacks = &mut self.precision.fallbacks;
            if let Some(loss) = loss {
                let found = StepFindings {
                    step,
                    last_of_phase: precision.last_step_of_phase(step),
                    loss,
                    is_update,
                    quantized: &quantized,
                    measured,
                };
                metrics.fallbacks = fallbacks.decide(&precision.fallback, &found);
            }
            metrics.ended_fallbacks = fallbacks.ended(phase, step);
        }
        if is_due(step, precision.log_interval) {
            metrics.layers = layers.unwrap_or_default();
        }
        let says_something = !precision.schedule.is_empty()
            || precision.fallback.is_set()
            || !metrics.layers.is_empty();
        Ok(says_something.then_some(metrics))
    }

    /// Whether the elements that are lost in a step are counted.
    pub(super) fn counts_losses(&self, step: u64) -> bool {
        let is_logged = is_due(step, self.core.config.precision.log_interval);
        self.precision.current.1.quantizes() && (is_logged || self.checks_bounds(step))
    }

    /// Whether layers fall back after a step if they lost too much in it.
    fn checks_bounds(&self, step: u64) -> bool {
        let fallback = &self.core.config.precision.fallback;
        fallback.has_bounds() && is_due(step, fallback.interval)
    }

    /// This rank's layers that may be quantised.
    pub(super) fn own_layers(&self) -> BTreeMap<String, QuantizedLayer> {
        quantized_layers(self.model_in_flight())
    }

    /// The weights whose largest magnitudes the optimizer finds when it writes them. Clipping of queries
    /// and keys changes weights after that.
    pub(super) fn weights_with_amaxes(
        &self,
        layers: &BTreeMap<String, QuantizedLayer>,
    ) -> Vec<String> {
        let is_found =
            |layer: &QuantizedLayer| layer.needs_amaxes() && !self.core.config.optimizer.qk_clip;
        let layers = layers.iter().filter(|(_, layer)| is_found(layer));
        layers.map(|(path, _)| weight_of(path)).collect()
    }

    /// The names of the layers of all ranks that may be quantised. Pipeline stages have different ones.
    ///
    /// # Collective
    /// All ranks, at the first call.
    pub(super) fn names_of_layers(&mut self) -> Result<Vec<String>, TrainError> {
        if let Some(names) = &self.precision.names {
            return Ok(names.clone());
        }
        let own: Vec<String> = self.own_layers().into_keys().collect();
        let world = &self.core.groups.world;
        let all = objects::gather(world, &own)?;
        let all: BTreeSet<String> = all.into_iter().flatten().collect();
        let names: Vec<String> = objects::broadcast(world, &Vec::from_iter(all))?;
        self.precision.names = Some(names.clone());
        Ok(names)
    }
}

/// The path of a layer's weight.
pub(super) fn weight_of(layer: &str) -> String {
    format!("{layer}.weight")
}

/// The name of a layer, without the number of its expert: the experts of a layer are computed
/// together, so all of them fall back if one does.
pub(super) fn without_expert(layer: &str) -> String {
    let mut parts: Vec<&str> = layer.split('.').collect();
    if let Some(at) = parts.iter().position(|part| *part == "experts") {
        parts.drain(at + 1..(at + 2).min(parts.len()));
    }
    parts.join(".")
}

fn is_due(step: u64, interval: u64) -> bool {
    interval > 0 && step.is_multiple_of(interval)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use megaburn_parallel::read_params;
    use rstest::rstest;

    use super::{weight_of, without_expert};
    use crate::trainer::{
        Trainer,
        testing::{poison, trainers},
    };

    #[test]
    fn experts_of_a_layer_have_one_name() {
        for (layer, expected) in [
            ("blocks.1.moe.experts.12.up", "blocks.1.moe.experts.up"),
            ("blocks.1.moe.shared.up", "blocks.1.moe.shared.up"),
            ("experts", "experts"),
        ] {
            assert_eq!(without_expert(layer), expected);
        }
    }

    /// The step of the optimizer finds the largest magnitudes of the weights that this rank updates as
    /// a whole, and a change to the weights makes them void.
    #[rstest]
    #[case("tp2", true)]
    #[case("dp2", true)]
    #[case("dp2", false)]
    fn a_step_finds_the_largest_magnitudes_of_new_weights(
        #[case] layout: &str,
        #[case] is_whole: bool,
        #[values("f32", "bf16")] dtype: &str,
    ) {
        let zero = if is_whole { 0 } else { 1 };
        let sets = [
            "precision.recipe=tensorwise".to_string(),
            format!("train.dtype={dtype}"),
            format!("parallel.zero={zero}"),
        ];
        let sets = sets.each_ref().map(String::as_str);
        trainers(&sets, layout, |mut trainer| {
            for _ in 0..2 {
                trainer.step()?;
                let params: BTreeMap<_, _> = read_params(trainer.model()).into_iter().collect();
                for (path, layer) in trainer.own_layers() {
                    let amax = layer.weight_amax();
                    assert!(amax.is_some() || !is_whole, "{path}");
                    let Some(amax) = amax else { continue };
                    let weight = params[&weight_of(&path)].clone().convert::<f32>();
                    let weight = weight.try_to_vec::<f32>().unwrap();
                    let largest = weight.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                    let found = amax.into_data().try_to_vec::<f32>().unwrap();
                    assert_eq!(found, [largest], "{path}");
                }
            }
            let layers = trainer.own_layers();
            trainer.core.model = Some(trainer.take_model());
            assert!(layers.values().all(|layer| layer.weight_amax().is_none()));
            Ok(())
        });
    }

    /// A weight with an element that is much larger than in the steps before saturates: all ranks know,
    /// also those that do not have it.
    #[rstest]
    fn a_weight_that_grows_lets_its_layer_fall_back(#[values("tp2", "pp2")] layout: &str) {
        let sets = [
            "precision.recipe=delayed",
            "precision.margin=2",
            "precision.fallback.max_saturated_share=0.001",
            "precision.fallback.interval=1",
            "precision.fallback.duration_steps=1",
        ];
        let ranks = trainers(&sets, layout, |mut trainer| {
            let mut steps = vec![trainer.step()?, trainer.step()?];
            if trainer.core.groups.world.rank() == 1 {
                poison(&mut trainer, "blocks.1.mlp.down.weight", 100.0);
            }
            steps.push(trainer.step()?);
            // The history of a layer that falls back ends, whether or not its first step is skipped.
            let has_history = |trainer: &Trainer, layer: &str| {
                let saved = trainer.amax_histories.saved();
                saved.contains_key(&format!("{layer}.weight"))
            };
            assert!(has_history(&trainer, "blocks.1.mlp.down"));
            trainer.begin_precision()?;
            let held = trainer.precision.held.clone();
            assert!(held.contains("blocks.1.mlp.down"));
            for layer in trainer.names_of_layers()? {
                assert_eq!(has_history(&trainer, &layer), !held.contains(&layer));
            }
            steps.extend([trainer.step()?, trainer.step()?]);
            let of = |step: megaburn_report::metrics::StepMetrics| step.precision.unwrap();
            Ok(steps.into_iter().map(of).collect::<Vec<_>>())
        });
        assert_eq!(ranks[0], ranks[1]);
        let of_layer = |step: usize| {
            let fallbacks = ranks[0][step - 1].fallbacks.iter();
            fallbacks
                .filter(|it| it.layer == "blocks.1.mlp.down")
                .collect::<Vec<_>>()
        };
        assert!(
            [1, 2, 4, 5]
                .into_iter()
                .all(|step| of_layer(step).is_empty())
        );
        let [found] = of_layer(3).try_into().unwrap();
        assert_eq!(found.matrix.as_deref(), Some("weight"));
        assert_eq!((found.value, found.until_step), (1.0 / (32.0 * 16.0), 4));
        let ended = &ranks[0][3].ended_fallbacks;
        assert!(ended.contains(&found.layer), "{ended:?}");
    }
}
