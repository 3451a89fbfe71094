use megaburn_data::BatchSchedule;
use megaburn_optim::{LrSchedule, Rates, WeightDecaySchedule};

use crate::{
    config::{ScheduleAt, TrainConfig},
    error::TrainError,
};

/// The quantities that change over a run, as functions of the samples it was trained on.
#[derive(Clone, Debug)]
pub(super) struct Schedules {
    pub(super) batch: BatchSchedule,
    lr: LrSchedule,
    /// The learning rate of the token embedding and the output matrix.
    decoupled_lr: LrSchedule,
    weight_decay: WeightDecaySchedule,
    at: ScheduleAt,
}

/// The learning rates and weight decay of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepRates {
    pub(super) lr: f64,
    decoupled_lr: f64,
    weight_decay: f64,
}

impl Schedules {
    pub(super) fn of(config: &TrainConfig) -> Result<Self, TrainError> {
        let optimizer = &config.optimizer;
        let steps = config.train.steps;
        let batch = config.train.batch_schedule()?;
        Ok(Self {
            lr: optimizer.lr_schedule(steps, &batch),
            decoupled_lr: optimizer.decoupled_schedule(steps, &batch),
            weight_decay: optimizer.weight_decay_schedule(steps, &batch),
            batch,
            at: optimizer.schedule_at,
        })
    }

    /// The rates of an update with a batch of `batch` samples, `before` samples after the start.
    pub(super) fn rates(&self, before: u64, batch: u64) -> StepRates {
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
            weight_decay: self.weight_decay.weight_decay(samples),
        }
    }
}

impl StepRates {
    /// The rates of the parameter at `path`.
    pub(super) fn of(&self, path: &str) -> Rates {
        let Self {
            lr,
            decoupled_lr,
            weight_decay,
        } = *self;
        let is_decoupled = path.starts_with("embedding.") || path.starts_with("head.");
        Rates {
            lr: if is_decoupled { decoupled_lr } else { lr },
            weight_decay,
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
