//! Which layers are computed in `train.dtype` for some steps instead of being quantised.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_report::metrics::{FallbackMetrics, LayerQuantization, MatrixQuantization};
use serde::{Deserialize, Serialize};

use crate::{config::PrecisionFallbackConfig, precision_line::HeldLayers};

/// The number of steps whose mean loss tells what a spike is.
const LOSSES: usize = 16;

/// The layers that fell back, and what decides on the next ones. Every rank has the same, because all
/// numbers are those of all ranks. Fall-backs end with their phase of `precision.schedule`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fallbacks {
    layers: BTreeMap<String, LayerFallback>,
    /// The losses of the last steps, if a spike decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    losses: Vec<f64>,
}

/// The last time that a layer fell back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct LayerFallback {
    /// The first step of it.
    from: u64,
    /// The last step of it.
    until: u64,
    /// How often the layer fell back until then.
    times: u32,
}

/// What is known after a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepFindings<'a> {
    pub(super) step: u64,
    /// The last step of the phase, unless it lasts until the end of the run.
    pub(super) last_of_phase: Option<u64>,
    pub(super) loss: f64,
    pub(super) is_update: bool,
    /// The layers that were quantised in the step.
    pub(super) quantized: &'a [String],
    /// What these layers lost, if the step decides on it.
    pub(super) measured: Option<&'a BTreeMap<String, LayerQuantization>>,
}

/// Why a layer falls back.
#[derive(Clone, Debug, PartialEq)]
struct Cause {
    matrix: Option<&'static str>,
    what: &'static str,
    value: f64,
    bound: f64,
}

impl Fallbacks {
    /// Whether there is nothing to save.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The state with which a run continues whose keys may have changed.
    pub(super) fn resumed(self, config: &PrecisionFallbackConfig) -> Self {
        match config.is_set() {
            false => Self::default(),
            true => Self {
                losses: match config.loss_spike {
                    Some(_) => self.losses,
                    None => Vec::new(),
                },
                ..self
            },
        }
    }

    /// The layers that are computed in `train.dtype` in a step of the phase that begins with `phase`.
    pub(super) fn layers_at(&self, phase: u64, step: u64) -> BTreeSet<String> {
        let held = self.held(phase, step);
        held.map(|(layer, _)| layer.clone()).collect()
    }

    /// The number of these layers, and until when; `None` if there are none.
    pub(super) fn summary(&self, phase: u64, step: u64) -> Option<HeldLayers> {
        let until_step = self.held(phase, step).map(|(_, last)| last.until).max()?;
        Some(HeldLayers {
            layers: self.held(phase, step).count(),
            until_step,
        })
    }

    fn held(&self, phase: u64, step: u64) -> impl Iterator<Item = (&String, &LayerFallback)> {
        let layers = self.layers.iter();
        layers
            .filter(move |(_, last)| last.from > phase && (last.from..=last.until).contains(&step))
    }

    /// Decides after a step which of the layers that were quantised in it fall back: none after the
    /// last step of a phase.
    pub(super) fn decide(
        &mut self,
        config: &PrecisionFallbackConfig,
        found: &StepFindings<'_>,
    ) -> Vec<FallbackMetrics> {
        let spike = self.spike(config, found);
        if found.last_of_phase == Some(found.step) {
            return Vec::new();
        }
        let none = LayerQuantization::default();
        let mut begun = Vec::new();
        for layer in found.quantized {
            let measured = found.measured.and_then(|measured| measured.get(layer));
            let cause = largest_excess(config, measured.unwrap_or(&none));
            let Some(cause) = cause.or_else(|| spike.clone()) else {
                continue;
            };
            begun.push(FallbackMetrics {
                layer: layer.clone(),
                matrix: cause.matrix.map(str::to_string),
                cause: cause.what.to_string(),
                value: cause.value,
                bound: cause.bound,
                until_step: self.begin(layer, config.duration_steps, found),
            });
        }
        begun
    }

    /// The layers whose fall-back ends with a step of the phase that begins with `phase`.
    pub(super) fn ended(&self, phase: u64, step: u64) -> Vec<String> {
        let ended = self
            .held(phase, step)
            .filter(|(_, last)| last.until == step);
        ended.map(|(layer, _)| layer.clone()).collect()
    }

    /// Lets a layer fall back after a step; returns the last step of it.
    fn begin(&mut self, layer: &str, first: u64, found: &StepFindings<'_>) -> u64 {
        let times = self.layers.get(layer).map_or(0, |last| last.times);
        let num_steps = first.saturating_mul(2u64.saturating_pow(times));
        let until = found.step.saturating_add(num_steps);
        let until = until.min(found.last_of_phase.unwrap_or(u64::MAX));
        let fallback = LayerFallback {
            from: found.step + 1,
            until,
            times: times.saturating_add(1),
        };
        self.layers.insert(layer.to_string(), fallback);
        until
    }

    /// The cause of fall-backs if a loss is a spike. That of a step with an update is recorded.
    fn spike(
        &mut self,
        config: &PrecisionFallbackConfig,
        found: &StepFindings<'_>,
    ) -> Option<Cause> {
        let factor = config.loss_spike?;
        let loss = found.loss;
        let is_full = self.losses.len() == LOSSES;
        let bound = factor * self.losses.iter().sum::<f64>() / LOSSES as f64;
        if found.is_update {
            if is_full {
                self.losses.remove(0);
            }
            self.losses.push(loss);
        }
        (is_full && loss > bound).then_some(Cause {
            matrix: None,
            what: "loss",
            value: loss,
            bound,
        })
    }
}

/// The share of a layer that exceeds its bound by the largest factor.
fn largest_excess(config: &PrecisionFallbackConfig, layer: &LayerQuantization) -> Option<Cause> {
    let LayerQuantization {
        input,
        weight,
        gradient,
    } = layer;
    let matrices = [("input", input), ("weight", weight), ("gradient", gradient)];
    let all = matrices.into_iter().flat_map(|(matrix, found)| {
        let of = |what, bound: Option<f64>, value: fn(&MatrixQuantization) -> f64| {
            Some(Cause {
                matrix: Some(matrix),
                what,
                value: value(found.as_ref()?),
                bound: bound?,
            })
        };
        [
            of("saturated", config.max_saturated_share, |it| it.saturated),
            of("underflowed", config.max_underflow_share, |it| {
                it.underflowed
            }),
        ]
    });
    let above = all.flatten().filter(|cause| cause.value > cause.bound);
    let excess = |cause: &Cause| [cause.value / cause.bound, cause.value];
    above.max_by(|a, b| {
        let [a, b] = [excess(a), excess(b)];
        a[0].total_cmp(&b[0]).then(a[1].total_cmp(&b[1]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PrecisionFallbackConfig {
        PrecisionFallbackConfig {
            max_saturated_share: Some(0.01),
            max_underflow_share: Some(0.5),
            duration_steps: 4,
            ..PrecisionFallbackConfig::default()
        }
    }

    fn measured(saturated: f64, underflowed: f64) -> BTreeMap<String, LayerQuantization> {
        let matrix = |saturated, underflowed| MatrixQuantization {
            saturated,
            underflowed,
            amax: 1.0,
        };
        let layer = LayerQuantization {
            input: Some(matrix(0.0, 0.1)),
            weight: None,
            gradient: Some(matrix(saturated, underflowed)),
        };
        BTreeMap::from([("a".to_string(), layer)])
    }

    fn names() -> [String; 2] {
        ["a".to_string(), "b".to_string()]
    }

    fn at_step(step: u64, names: &[String]) -> StepFindings<'_> {
        StepFindings {
            step,
            last_of_phase: Some(100),
            loss: 1.0,
            is_update: true,
            quantized: names,
            measured: None,
        }
    }

    #[test]
    fn a_layer_falls_back_for_twice_as_long_each_time() {
        let names = names();
        let mut fallbacks = Fallbacks::default();
        let mut decide = |step, saturated, underflowed, duration_steps| {
            let measured = measured(saturated, underflowed);
            let found = StepFindings {
                measured: Some(&measured),
                ..at_step(step, &names)
            };
            let config = PrecisionFallbackConfig {
                duration_steps,
                ..config()
            };
            (fallbacks.decide(&config, &found), fallbacks.clone())
        };
        // A share equal to its bound is not above it.
        let (found, state) = decide(10, 0.01, 0.5, 4);
        assert!(found.is_empty() && state.is_empty());
        let (found, state) = decide(20, 0.03, 0.6, 4);
        let expected = FallbackMetrics {
            layer: "a".into(),
            matrix: Some("gradient".into()),
            cause: "saturated".into(),
            value: 0.03,
            bound: 0.01,
            until_step: 24,
        };
        assert_eq!(found, [expected]);
        let held = (18..30).filter(|step| !state.layers_at(1, *step).is_empty());
        assert_eq!(held.collect::<Vec<_>>(), [21, 22, 23, 24]);
        assert_eq!(state.layers_at(1, 22), BTreeSet::from(["a".to_string()]));
        let held = HeldLayers {
            layers: 1,
            until_step: 24,
        };
        assert_eq!(state.summary(1, 22), Some(held));
        assert_eq!(state.summary(1, 25), None);
        assert_eq!((state.ended(1, 23).len(), state.ended(1, 24).len()), (0, 1));
        let (found, state) = decide(30, 0.0, 0.6, 4);
        let [again] = found.try_into().unwrap();
        assert_eq!(
            (again.cause.as_str(), again.until_step),
            ("underflowed", 38)
        );
        // What is saved decides as what was not interrupted.
        let saved = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<Fallbacks>(&saved).unwrap(), state);
        // Another duration holds for the third time.
        let (found, _) = decide(40, 0.0, 0.6, 2);
        assert_eq!(found[0].until_step, 40 + 2 * 4);
    }

    /// A phase ends the fall-backs of the one before, and after its last step there is nothing to
    /// decide.
    #[test]
    fn fallbacks_end_with_their_phase() {
        let names = names();
        let measured = measured(1.0, 1.0);
        let found = |step| StepFindings {
            measured: Some(&measured),
            ..at_step(step, &names)
        };
        let mut fallbacks = Fallbacks::default();
        assert_eq!(fallbacks.decide(&config(), &found(98))[0].until_step, 100);
        assert_eq!(fallbacks.ended(1, 100), ["a"]);
        // The schedule of a resumed run may have another phase from step 99 on.
        assert!(fallbacks.layers_at(99, 99).is_empty());
        assert!(fallbacks.decide(&config(), &found(100)).is_empty());
    }

    #[test]
    fn after_a_spike_of_the_loss_all_layers_fall_back() {
        let names = names();
        let config = PrecisionFallbackConfig {
            loss_spike: Some(1.5),
            duration_steps: 4,
            ..PrecisionFallbackConfig::default()
        };
        let mut fallbacks = Fallbacks::default();
        let mut decide = |step, loss, is_update| {
            let found = fallbacks.decide(
                &config,
                &StepFindings {
                    loss,
                    is_update,
                    ..at_step(step, &names)
                },
            );
            let of_layers = found.into_iter().map(|it| (it.layer, it.bound));
            of_layers.collect::<Vec<_>>()
        };
        // There are not enough steps yet.
        assert_eq!(decide(1, 9.0, true), []);
        for step in 2..=17 {
            assert_eq!(decide(step, 2.0, true), []);
        }
        // The loss of a step without an update may be a spike, but is not one of the mean.
        assert_eq!(
            decide(18, 3.5, false),
            names.clone().map(|name| (name, 3.0))
        );
        assert_eq!(decide(19, 3.0, true), []);
        let bound = 1.5 * (15.0 * 2.0 + 3.0) / 16.0;
        let expected = names.clone().map(|name| (name, bound));
        assert_eq!(decide(20, 3.5, true), expected);
        // Losses from before a time without the key say nothing later.
        let without = PrecisionFallbackConfig {
            max_saturated_share: Some(0.5),
            ..PrecisionFallbackConfig::default()
        };
        assert!(fallbacks.clone().resumed(&config) == fallbacks);
        let resumed = fallbacks.clone().resumed(&without);
        assert!(resumed.losses.is_empty() && resumed.layers == fallbacks.layers);
        let none = PrecisionFallbackConfig::default();
        assert!(fallbacks.resumed(&none).is_empty());
    }
}
