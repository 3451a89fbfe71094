//! The schedules of learning rate and weight decay in `[optimizer]`, as functions of samples.

mod check;

use megaburn_data::BatchSchedule;
use megaburn_optim::{Decay, LrSchedule, WeightDecaySchedule};

use super::{LrDecayStyle, OptimizerConfig, TrainingConfig};

/// A tenth of a learning rate, the usual end of its decay, rounded to remove floating-point noise.
pub(in crate::config) fn tenth(lr: f64) -> f64 {
    format!("{:.9e}", lr / 10.0)
        .parse()
        .expect("the text was printed from a number")
}

impl OptimizerConfig {
    /// The learning rate schedule of a run of `steps` updates. A run shorter than the warm-up
    /// consists of warm-up only.
    pub fn lr_schedule(&self, steps: u64, batches: &BatchSchedule) -> LrSchedule {
        let run = self
            .decay_samples
            .unwrap_or_else(|| batches.samples_after(self.decay_steps.unwrap_or(steps)));
        let warmup_samples = match (self.warmup_samples, self.warmup_fraction) {
            (Some(samples), _) => samples,
            (None, Some(fraction)) => (run as f64 * fraction).round() as u64,
            (None, None) => batches.samples_after(self.warmup_steps),
        };
        let decay_samples = run.max(warmup_samples.saturating_add(1));
        let decay = match self.lr_decay_style {
            LrDecayStyle::Constant => Decay::Constant,
            LrDecayStyle::Linear => Decay::Linear,
            LrDecayStyle::Cosine => Decay::Cosine,
            LrDecayStyle::InverseSquareRoot => Decay::InverseSquareRoot,
            LrDecayStyle::Wsd => {
                let full = batches.largest() as u64;
                let of_steps = self.wsd_decay_steps.map(|steps| steps.saturating_mul(full));
                let samples = self
                    .wsd_decay_samples
                    .or(of_steps)
                    .unwrap_or(decay_samples / 10);
                // If the decay follows the length of the run, its final part is limited to the run
                // as well.
                let stable = decay_samples - warmup_samples;
                let samples = if self.has_decay() {
                    samples
                } else {
                    samples.min(stable)
                };
                Decay::Wsd {
                    samples,
                    style: self.wsd_decay_style,
                }
            }
        };
        let Self {
            init_lr,
            lr,
            min_lr,
            ..
        } = *self;
        LrSchedule {
            init: init_lr,
            max: lr,
            min: min_lr,
            warmup_samples,
            decay_samples,
            decay,
        }
    }

    /// The learning rate schedule of the token embedding and the output matrix.
    pub fn decoupled_schedule(&self, steps: u64, batches: &BatchSchedule) -> LrSchedule {
        let schedule = self.lr_schedule(steps, batches);
        let max = self.decoupled_lr.unwrap_or(schedule.max);
        let min = self.decoupled_min_lr.unwrap_or(schedule.min.min(max));
        LrSchedule {
            max,
            min,
            init: schedule.init.min(max),
            ..schedule
        }
    }

    /// The weight decay schedule of a run of `steps` updates. Weight decay changes over the full
    /// run unless `weight_decay_steps` is set.
    pub fn weight_decay_schedule(
        &self,
        steps: u64,
        batches: &BatchSchedule,
    ) -> WeightDecaySchedule {
        let start = self.weight_decay;
        let style = self.weight_decay_style;
        match self.end_weight_decay.filter(|end| *end != start) {
            Some(end) => {
                let samples = batches.samples_after(self.weight_decay_steps.unwrap_or(steps));
                WeightDecaySchedule {
                    start,
                    end,
                    samples,
                    style,
                }
            }
            None => WeightDecaySchedule::constant(start),
        }
    }

    /// Whether the length of the decay is set, instead of following the run.
    fn has_decay(&self) -> bool {
        self.decay_steps.is_some() || self.decay_samples.is_some()
    }

    /// Sets the lengths over which learning rate and weight decay change, so that comparing records
    /// shows that a changed number of steps changes the schedules.
    pub(in crate::config) fn resolve_horizons(&mut self, train: &TrainingConfig) {
        let Ok(batches) = train.batch_schedule() else {
            return;
        };
        let LrSchedule { warmup_samples, .. } = self.lr_schedule(train.steps, &batches);
        // A run that consists of warm-up only has no decay.
        if !self.has_decay() && batches.samples_after(train.steps) > warmup_samples {
            self.decay_steps = Some(train.steps);
        }
        if self.end_weight_decay.is_some() {
            self.weight_decay_steps.get_or_insert(train.steps);
        }
    }
}

#[cfg(test)]
mod tests {
    use megaburn_optim::WeightDecayStyle;

    use super::*;
    use crate::config::ConfigLayers;

    /// The learning rate of each update of a run.
    fn rates(lines: &str, steps: u64) -> Vec<f64> {
        let text = format!("[optimizer]\n{lines}");
        let config = ConfigLayers::new()
            .with_text("s.toml", &text)
            .unwrap()
            .load()
            .unwrap();
        let batches = config.train.batch_schedule().unwrap();
        let schedule = config.optimizer.lr_schedule(steps, &batches);
        (1..=steps)
            .map(|step| schedule.lr(batches.samples_after(step)))
            .collect()
    }

    #[test]
    fn the_decay_ends_with_the_run_unless_told_otherwise() {
        let config = OptimizerConfig::default();
        let batches = BatchSchedule::constant(8).unwrap();
        assert_eq!(config.lr_schedule(300, &batches).lr(2400), config.min_lr);
        let longer = OptimizerConfig {
            decay_steps: Some(600),
            ..config
        };
        assert!(longer.lr_schedule(300, &batches).lr(2400) > longer.min_lr);
        assert_eq!(longer.lr_schedule(300, &batches).lr(4800), longer.min_lr);
    }

    #[test]
    fn a_run_shorter_than_the_warm_up_only_warms_up() {
        let batches = BatchSchedule::constant(8).unwrap();
        let schedule = OptimizerConfig::default().lr_schedule(5, &batches);
        assert_eq!(schedule.lr(40), 3e-3 * 5.0 / 20.0);
        assert_eq!(schedule.lr(160), 3e-3);
    }

    #[test]
    fn lengths_are_said_in_updates_samples_or_parts() {
        let expected = rates("warmup_steps = 30\ndecay_steps = 300", 400);
        for same in [
            "warmup_samples = 240\ndecay_steps = 300",
            "warmup_fraction = 0.1\ndecay_samples = 2400",
            "warmup_steps = 30\ndecay_samples = 2400",
        ] {
            assert_eq!(rates(same, 400), expected, "{same}");
        }
        let wsd = "warmup_steps = 30\nlr_decay_style = 'wsd'\ndecay_steps = 300\n";
        let expected = rates(&format!("{wsd}wsd_decay_steps = 30"), 400);
        assert_eq!(rates(wsd, 400), expected);
        assert_eq!(
            rates(&format!("{wsd}wsd_decay_samples = 240"), 400),
            expected
        );
        assert_eq!(expected.iter().filter(|&&lr| lr == 3e-3).count(), 241);
        assert_eq!(expected[299..], [3e-4; 101]);
    }

    #[test]
    fn a_run_too_short_for_its_schedule_runs_all_the_same() {
        for style in ["wsd", "inverse_square_root", "cosine", "constant"] {
            let found = rates(
                &format!("lr_decay_style = '{style}'\nwsd_decay_steps = 30"),
                5,
            );
            assert_eq!(found, rates("", 5), "{style}");
        }
        let endless = OptimizerConfig {
            warmup_steps: u64::MAX,
            ..OptimizerConfig::default()
        };
        let schedule = endless.lr_schedule(5, &BatchSchedule::constant(8).unwrap());
        assert!((0.0..1e-12).contains(&schedule.lr(40)));
    }

    /// Twice the samples per step is half the steps: rates are functions of samples.
    #[test]
    fn a_batch_that_grows_reaches_the_same_rates_at_the_same_samples() {
        let text =
            "[train]\nsteps = 150\n[train.batch_ramp]\nstart = 4\nincrement = 4\nsamples = 400";
        let ramped = ConfigLayers::new()
            .with_text("r.toml", text)
            .unwrap()
            .load()
            .unwrap();
        let batches = ramped.train.batch_schedule().unwrap();
        assert_eq!(
            [0, 399, 400].map(|read| batches.batch_size(read)),
            [4, 4, 8]
        );
        assert_eq!(batches.samples_after(150), 800);
        let schedule = ramped.optimizer.lr_schedule(150, &batches);
        assert_eq!((schedule.warmup_samples, schedule.decay_samples), (80, 800));
        let plain = OptimizerConfig {
            warmup_steps: 10,
            ..OptimizerConfig::default()
        };
        assert_eq!(
            plain.lr_schedule(100, &BatchSchedule::constant(8).unwrap()),
            schedule
        );
    }

    #[test]
    fn embedding_and_head_have_a_rate_of_their_own() {
        let batches = BatchSchedule::constant(8).unwrap();
        let config = OptimizerConfig {
            init_lr: 1e-3,
            ..OptimizerConfig::default()
        };
        let all = config.lr_schedule(100, &batches);
        assert_eq!(config.decoupled_schedule(100, &batches), all);
        let own = OptimizerConfig {
            decoupled_lr: Some(1e-4),
            ..config
        };
        let expected = LrSchedule {
            init: 1e-4,
            max: 1e-4,
            min: 1e-4,
            ..all
        };
        assert_eq!(own.decoupled_schedule(100, &batches), expected);
        let own = OptimizerConfig {
            decoupled_min_lr: Some(1e-5),
            ..own
        };
        let expected = LrSchedule {
            init: 1e-4,
            max: 1e-4,
            min: 1e-5,
            ..all
        };
        assert_eq!(own.decoupled_schedule(100, &batches), expected);
        assert_eq!(own.lr_schedule(100, &batches), all);
    }

    #[test]
    fn weight_decay_may_change_over_the_run() {
        let batches = BatchSchedule::constant(8).unwrap();
        let config = OptimizerConfig::default();
        let schedule = config.weight_decay_schedule(100, &batches);
        assert_eq!([0, 400, 800].map(|at| schedule.weight_decay(at)), [0.1; 3]);
        let config = OptimizerConfig {
            end_weight_decay: Some(0.3),
            weight_decay_style: WeightDecayStyle::Cosine,
            ..config
        };
        let schedule = config.weight_decay_schedule(100, &batches);
        let found = [0, 400, 800].map(|at| schedule.weight_decay(at));
        assert_eq!(
            found.map(|decay| (decay * 1e9).round() / 1e9),
            [0.1, 0.2, 0.3]
        );
        // With its own length, the schedule does not depend on where the run stops.
        let pinned = OptimizerConfig {
            weight_decay_steps: Some(100),
            ..config
        };
        for steps in [50, 100, 200] {
            assert_eq!(pinned.weight_decay_schedule(steps, &batches), schedule);
        }
        let train = TrainingConfig {
            steps: 70,
            ..TrainingConfig::default()
        };
        let mut resolved = OptimizerConfig {
            weight_decay_steps: None,
            ..pinned
        };
        resolved.resolve_horizons(&train);
        assert_eq!(resolved.weight_decay_steps, Some(70));
        resolved.resolve_horizons(&TrainingConfig { steps: 90, ..train });
        assert_eq!(resolved.weight_decay_steps, Some(70));
    }
}
