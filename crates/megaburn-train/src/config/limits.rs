//! The time limits of `[train]`.

use std::time::Duration;

use megaburn_collective::{GroupOptions, PhaseLimits};

use super::{TrainConfig, TrainingConfig};

impl TrainingConfig {
    /// How long a rank waits in a collective for a rank that is in none of the phases
    /// (`train.timeout_seconds`).
    pub fn timeout(&self) -> Duration {
        duration(self.timeout_seconds)
    }

    /// How long each phase of a run may go without progress.
    pub fn phase_limits(&self) -> PhaseLimits {
        PhaseLimits {
            start: duration(self.start_timeout_seconds),
            save: duration(self.save_timeout_seconds),
            load: duration(self.load_timeout_seconds),
            data: duration(self.data_timeout_seconds),
            evaluate: duration(self.eval_timeout_seconds),
        }
    }

    /// How long a rank may give no sign of life outside collectives and phases.
    pub fn step_timeout(&self) -> Duration {
        duration(self.step_timeout_seconds)
    }
}

impl TrainConfig {
    /// The seed and time limits of the run's process groups.
    pub(crate) fn group_options(&self) -> GroupOptions {
        let timeout = self.train.timeout();
        let phases = self.train.phase_limits();
        GroupOptions {
            seed: self.run.seed,
            timeout,
            phases,
        }
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    #[test]
    fn a_limit_that_no_run_can_use_is_refused() {
        for key in [
            "timeout",
            "start_timeout",
            "save_timeout",
            "load_timeout",
            "data_timeout",
            "eval_timeout",
            "step_timeout",
        ] {
            for value in ["0", "inf", "-1"] {
                let line = format!("train.{key}_seconds = {value}");
                let layers = ConfigLayers::new().with_text("s.toml", &line);
                let error = layers.and_then(ConfigLayers::load).unwrap_err();
                let message = format!("`train.{key}_seconds` is {value}: it must be from 0.001");
                assert!(error.to_string().contains(&message), "{error}");
                assert_eq!(error.exit(), Exit::BadInput);
            }
        }
    }

    #[test]
    fn limits_may_be_fractions_of_a_second() {
        let config = TrainingConfig {
            timeout_seconds: 0.25,
            ..TrainingConfig::default()
        };
        assert_eq!(config.timeout(), Duration::from_millis(250));
        let save = TrainingConfig {
            save_timeout_seconds: 0.5,
            ..config
        }
        .phase_limits()
        .save;
        assert_eq!(save, Duration::from_millis(500));
    }
}
