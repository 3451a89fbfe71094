use std::{collections::BTreeMap, sync::Arc};

use megaburn_data::BatchSchedule;
use megaburn_optim::{LrSchedule, Rates, WeightDecaySchedule};

use crate::{
    config::{ParamGroupConfig, ScheduleAt, TrainConfig},
    error::TrainError,
};

/// The quantities that change over a run, as functions of the samples it was trained on.
#[derive(Clone, Debug)]
pub(crate) struct Schedules {
    pub(crate) batch: BatchSchedule,
    lr: LrSchedule,
    /// The learning rate of the token embedding and the output matrix.
    decoupled_lr: LrSchedule,
    is_decoupled: bool,
    weight_decay: WeightDecaySchedule,
    at: ScheduleAt,
    groups: Arc<[ParamGroup]>,
    /// How much wider the model is than that for which the learning rate was found (μP).
    width: f64,
}

/// The parameters with rates of their own.
#[derive(Clone, Debug, PartialEq)]
struct ParamGroup {
    config: ParamGroupConfig,
    /// Factor of the learning rate.
    factor: Option<f64>,
}

/// The learning rates and weight decay of one update.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepRates {
    pub(crate) lr: f64,
    decoupled_lr: f64,
    /// Whether the configuration sets `decoupled_lr`.
    is_decoupled: bool,
    weight_decay: f64,
    groups: Arc<[ParamGroup]>,
    width: f64,
}

impl Schedules {
    pub(crate) fn of(config: &TrainConfig) -> Result<Self, TrainError> {
        let optimizer = &config.optimizer;
        let steps = config.train.steps;
        let batch = config.train.batch_schedule()?;
        Ok(Self {
            lr: optimizer.lr_schedule(steps, &batch),
            decoupled_lr: optimizer.decoupled_schedule(steps, &batch),
            is_decoupled: optimizer.decoupled_lr.is_some(),
            weight_decay: optimizer.weight_decay_schedule(steps, &batch),
            batch,
            at: optimizer.schedule_at,
            width: config.model.width_multiplier(),
            groups: optimizer
                .groups
                .iter()
                .map(|group| ParamGroup {
                    config: group.clone(),
                    factor: group.lr.map(|lr| lr / optimizer.lr),
                })
                .collect(),
        })
    }

    /// The rates of an update with a batch of `batch` samples, `before` samples after the start.
    pub(crate) fn rates(&self, before: u64, batch: u64) -> StepRates {
        self.rates_at(match self.at {
            ScheduleAt::Start => before,
            ScheduleAt::End => before + batch,
        })
    }

    /// The rates after a number of samples.
    fn rates_at(&self, samples: u64) -> StepRates {
        StepRates {
            lr: self.lr.lr(samples),
            decoupled_lr: self.decoupled_lr.lr(samples),
            is_decoupled: self.is_decoupled,
            weight_decay: self.weight_decay.weight_decay(samples),
            groups: self.groups.clone(),
            width: self.width,
        }
    }
}

impl StepRates {
    /// The learning rates other than `lr`, by the names in `group_lrs` of a step's metrics.
    pub(crate) fn of_groups(&self) -> BTreeMap<String, f64> {
        let decoupled = self
            .is_decoupled
            .then_some(("decoupled", self.decoupled_lr));
        let hidden = (self.width != 1.0).then_some(("hidden", self.lr / self.width));
        let groups = self.groups.iter().filter_map(|group| {
            let factor = group.factor?;
            Some((group.config.pattern.as_str(), self.lr * factor))
        });
        let rates = decoupled.into_iter().chain(hidden).chain(groups);
        rates.map(|(name, lr)| (name.to_string(), lr)).collect()
    }

    /// The rates of the parameter at `path`.
    pub(crate) fn of(&self, path: &str) -> Rates {
        let Self {
            lr,
            decoupled_lr,
            weight_decay,
            ref groups,
            width,
            ..
        } = *self;
        let is_decoupled = path.starts_with("embedding.") || path.starts_with("head.");
        let is_hidden_matrix = path.starts_with("blocks.") && path.ends_with(".weight");
        let all = Rates {
            lr: if is_decoupled {
                decoupled_lr
            } else if is_hidden_matrix {
                lr / width
            } else {
                lr
            },
            weight_decay,
        };
        match groups.iter().find(|group| group.config.matches(path)) {
            Some(ParamGroup { config, factor }) => Rates {
                lr: factor.map_or(all.lr, |factor| lr * factor),
                weight_decay: config.weight_decay.unwrap_or(all.weight_decay),
            },
            None => all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigLayers;

    #[test]
    fn only_embedding_and_head_are_decoupled() {
        let text = "[optimizer]\nwarmup_steps = 10\ndecoupled_lr = 1e-4\nend_weight_decay = 0.5
                    [train]\nsteps = 100\nglobal_batch = 8";
        let config = ConfigLayers::new()
            .with_text("s.toml", text)
            .unwrap()
            .load()
            .unwrap();
        let rates = Schedules::of(&config).unwrap().rates(32, 8);
        let weight_decay = 0.1 + (0.5 - 0.1) * 0.05;
        let all = Rates {
            lr: 1.5e-3,
            weight_decay,
        };
        let own = Rates {
            lr: 5e-5,
            weight_decay,
        };
        for path in ["embedding.weight", "head.weight"] {
            assert_eq!(rates.of(path), own, "{path}");
        }
        for path in [
            "norm.weight",
            "positions.weight",
            "blocks.0.head.weight",
            "embedding_norm.w",
        ] {
            assert_eq!(rates.of(path), all, "{path}");
        }
        assert_eq!(rates.lr, 1.5e-3);
        assert_eq!(rates.of_groups(), [("decoupled".to_string(), 5e-5)].into());
    }

    /// Source: Yang et al., "Tensor Programs V" (2022), for Adam.
    #[test]
    fn hidden_matrices_of_a_wider_model_learn_more_slowly() {
        let text = "[model]\nhidden = 256\n[model.parts]\nmup_base_hidden = 64\nmlp_bias = true
                    [optimizer]\nlr = 1e-2\nwarmup_steps = 0\nlr_decay_style = \"constant\"";
        let layers = ConfigLayers::new().with_text("s.toml", text).unwrap();
        let rates = Schedules::of(&layers.load().unwrap()).unwrap().rates(8, 8);
        assert_eq!(rates.of("blocks.1.mlp.up.weight").lr, 2.5e-3);
        for path in [
            "blocks.1.mlp.up.bias",
            "blocks.0.mlp_norm.gamma",
            "embedding.weight",
        ] {
            assert_eq!(rates.of(path).lr, 1e-2, "{path}");
        }
        assert_eq!(rates.of_groups(), [("hidden".to_string(), 2.5e-3)].into());
    }

    /// The first group that fits decides, and a group without a learning rate keeps that of the rest.
    #[test]
    fn groups_have_rates_of_their_own() {
        let text = "[optimizer]\nlr = 2e-3\nwarmup_steps = 10\nweight_decay = 0.1
                    [[optimizer.groups]]\nmatch = \"blocks.0.*\"\nlr = 1e-3
                    [[optimizer.groups]]\nmatch = \"*.bias\"\nweight_decay = 0.5
                    [[optimizer.groups]]\nmatch = \"blocks.*\"\nlr = 0.0\nweight_decay = 0.0
                    [train]\nsteps = 100\nglobal_batch = 8";
        let layers = ConfigLayers::new().with_text("s.toml", text).unwrap();
        let rates = Schedules::of(&layers.load().unwrap()).unwrap().rates(32, 8);
        let found = |path: &str| {
            let Rates { lr, weight_decay } = rates.of(path);
            [lr, weight_decay]
        };
        assert_eq!(found("norm.gamma"), [1e-3, 0.1]);
        assert_eq!(found("blocks.0.mlp.up.bias"), [5e-4, 0.1]);
        assert_eq!(found("blocks.1.mlp.up.bias"), [1e-3, 0.5]);
        assert_eq!(found("blocks.1.mlp.up.weight"), [0.0, 0.0]);
        let groups = [("blocks.*", 0.0), ("blocks.0.*", 5e-4)];
        let groups = groups.map(|(name, lr)| (name.to_string(), lr));
        assert_eq!(rates.of_groups(), groups.into());
    }

    #[test]
    fn an_update_takes_the_rates_of_its_end_or_of_its_start() {
        let rates = |at: &str, before| {
            let text = format!(
                "[optimizer]\nschedule_at = \"{at}\"\nwarmup_steps = 10\nend_weight_decay = 0.5\n
                 [train]\nsteps = 100\nglobal_batch = 8"
            );
            let layers = ConfigLayers::new().with_text("s.toml", &text).unwrap();
            let schedules = Schedules::of(&layers.load().unwrap()).unwrap();
            schedules.rates(before, 8).of("norm.gamma")
        };
        for before in [0, 8, 72, 80, 400] {
            assert_eq!(rates("start", before + 8), rates("end", before), "{before}");
        }
        assert_eq!(rates("start", 0).lr, 0.0);
    }
}
