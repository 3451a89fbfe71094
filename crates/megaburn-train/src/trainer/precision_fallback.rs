//! Which layers are computed in `train.dtype` for some steps instead of being quantised.

use std::collections::{BTreeMap, BTreeSet};

use megaburn_report::metrics::{FallbackMetrics, LayerQuantization, MatrixQuantization};
use serde::{Deserialize, Serialize};

use crate::config::PrecisionFallbackConfig;

/// The number of steps whose mean loss tells what a spike is.
const LOSSES: usize = 16;

/// The layers that fell back, and what decides on the next ones. Every rank has the same, because all
/// numbers are those of all ranks.
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
    /// The number of steps of it.
    num_steps: u64,
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

    /// Whether a layer is computed in `train.dtype` in a step.
    pub(super) fn holds(&self, layer: &str, step: u64) -> bool {
        let last = self.layers.get(layer);
        last.is_some_and(|last| (last.from..=last.until).contains(&step))
    }

    /// The layers that are computed in `train.dtype` in a step.
    pub(super) fn layers_at(&self, step: u64) -> BTreeSet<String> {
        let held = self.layers.keys().filter(|layer| self.holds(layer, step));
        held.cloned().collect()
    }

    /// Decides after a step which of the layers that were quantised in it fall back. `measured` has
    /// their shares, if they were measured.
    pub(super) fn decide(
        &mut self,
        config: &PrecisionFallbackConfig,
        step: u64,
        loss: f64,
        quantized: &[String],
        measured: Option<&BTreeMap<String, LayerQuantization>>,
    ) -> Vec<FallbackMetrics> {
        let spike = self.spike(config, loss);
        let none = LayerQuantization::default();
        let mut begun = Vec::new();
        for layer in quantized {
            let found = measured.and_then(|measured| measured.get(layer));
            let cause = largest_excess(config, found.unwrap_or(&none));
            let Some(cause) = cause.or_else(|| spike.clone()) else {
                continue;
            };
            let until_step = self.begin(layer, step, config.duration_steps);
            begun.push(FallbackMetrics {
                layer: layer.clone(),
                matrix: cause.matrix.map(str::to_string),
                cause: cause.what.to_string(),
                value: cause.value,
                bound: cause.bound,
                until_step,
            });
        }
        begun
    }

    /// The layers that are quantised again after a step.
    pub(super) fn ended(&self, step: u64) -> Vec<String> {
        let ended = self.layers.iter().filter(|(_, last)| last.until == step);
        ended.map(|(layer, _)| layer.clone()).collect()
    }

    /// Lets a layer fall back after a step; returns the last step of it.
    fn begin(&mut self, layer: &str, step: u64, first: u64) -> u64 {
        let last = self.layers.get(layer);
        let num_steps = last.map_or(first, |last| last.num_steps.saturating_mul(2));
        let until = step.saturating_add(num_steps);
        let fallback = LayerFallback {
            from: step + 1,
            until,
            num_steps,
        };
        self.layers.insert(layer.to_string(), fallback);
        until
    }

    /// Records a loss; it is the cause of fall-backs if it is a spike.
    fn spike(&mut self, config: &PrecisionFallbackConfig, loss: f64) -> Option<Cause> {
        let factor = config.loss_spike?;
        let is_full = self.losses.len() == LOSSES;
        let bound = factor * self.losses.iter().sum::<f64>() / LOSSES as f64;
        if is_full {
            self.losses.remove(0);
        }
        self.losses.push(loss);
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

    #[test]
    fn a_layer_falls_back_for_twice_as_long_each_time() {
        let mut fallbacks = Fallbacks::default();
        let mut decide = |step, saturated, underflowed| {
            let measured = measured(saturated, underflowed);
            let found = fallbacks.decide(&config(), step, 1.0, &names(), Some(&measured));
            (found, fallbacks.clone())
        };
        // A share equal to its bound is not above it.
        let (found, state) = decide(10, 0.01, 0.5);
        assert!(found.is_empty() && state.is_empty());
        let (found, state) = decide(20, 0.03, 0.6);
        let expected = FallbackMetrics {
            layer: "a".into(),
            matrix: Some("gradient".into()),
            cause: "saturated".into(),
            value: 0.03,
            bound: 0.01,
            until_step: 24,
        };
        assert_eq!(found, [expected]);
        let held = (18..30).filter(|step| state.holds("a", *step));
        assert_eq!(held.collect::<Vec<_>>(), [21, 22, 23, 24]);
        assert!(!state.holds("b", 22));
        assert_eq!((state.ended(23).len(), state.ended(24).len()), (0, 1));
        let (found, state) = decide(30, 0.0, 0.6);
        let [again] = found.try_into().unwrap();
        assert_eq!(
            (again.cause.as_str(), again.until_step),
            ("underflowed", 38)
        );
        assert_eq!(state.layers_at(38), BTreeSet::from(["a".to_string()]));
        assert!(state.layers_at(39).is_empty());
        // What is saved decides as what was not interrupted.
        let saved = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<Fallbacks>(&saved).unwrap(), state);
    }

    #[test]
    fn after_a_spike_of_the_loss_all_layers_fall_back() {
        let config = PrecisionFallbackConfig {
            loss_spike: Some(1.5),
            duration_steps: 4,
            ..PrecisionFallbackConfig::default()
        };
        let mut fallbacks = Fallbacks::default();
        let mut decide = |step, loss| {
            let found = fallbacks.decide(&config, step, loss, &names(), None);
            found
                .into_iter()
                .map(|it| (it.layer, it.bound))
                .collect::<Vec<_>>()
        };
        // There are not enough steps yet.
        assert_eq!(decide(1, 9.0), []);
        for step in 2..=17 {
            assert_eq!(decide(step, 2.0), []);
        }
        assert_eq!(decide(18, 3.0), []);
        let bound = 1.5 * (15.0 * 2.0 + 3.0) / 16.0;
        let expected = names().map(|name| (name, bound));
        assert_eq!(decide(19, 3.5), expected);
    }
}
