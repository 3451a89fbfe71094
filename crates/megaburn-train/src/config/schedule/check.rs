use megaburn_optim::{Decay, LrSchedule};

use super::super::{LrDecayStyle, OptimizerConfig, TrainingConfig, require::require};
use crate::error::TrainError;

impl OptimizerConfig {
    /// Refuses schedules that are contradictory or impossible.
    pub(in crate::config) fn validate_schedules(
        &self,
        train: &TrainingConfig,
    ) -> Result<(), TrainError> {
        let Self {
            lr,
            min_lr,
            init_lr,
            ..
        } = *self;
        let rule = format!("from 0 to optimizer.lr {lr}");
        let advice = if min_lr == Self::default().min_lr {
            format!(
                "; that is its default, so set optimizer.min_lr too, for example to {:e}",
                super::tenth(lr)
            )
        } else {
            "; lower optimizer.min_lr or raise optimizer.lr".to_string()
        };
        let ok = (0.0..=lr).contains(&min_lr);
        require(ok, "optimizer.min_lr", min_lr, format!("{rule}{advice}"))?;
        require(
            (0.0..=lr).contains(&init_lr),
            "optimizer.init_lr",
            init_lr,
            rule,
        )?;
        if let Some(min) = self.decoupled_min_lr {
            let rule = match self.decoupled_lr {
                Some(lr) => format!("from 0 to optimizer.decoupled_lr {lr}"),
                None => format!("from 0 to optimizer.lr {lr}"),
            };
            let lr = self.decoupled_lr.unwrap_or(lr);
            require(
                (0.0..=lr).contains(&min),
                "optimizer.decoupled_min_lr",
                min,
                rule,
            )?;
        }
        self.validate_lengths(train)
    }

    fn validate_lengths(&self, train: &TrainingConfig) -> Result<(), TrainError> {
        for (key, given, other, instead) in [
            (
                "optimizer.warmup_fraction",
                self.warmup_fraction.is_some(),
                "optimizer.warmup_samples",
                self.warmup_samples.is_some(),
            ),
            (
                "optimizer.decay_samples",
                self.decay_samples.is_some(),
                "optimizer.decay_steps",
                self.decay_steps.is_some(),
            ),
            (
                "optimizer.wsd_decay_samples",
                self.wsd_decay_samples.is_some(),
                "optimizer.wsd_decay_steps",
                self.wsd_decay_steps.is_some(),
            ),
        ] {
            require(
                !(given && instead),
                key,
                "given",
                format!("absent if {other} is given"),
            )?;
        }
        let batches = train.batch_schedule()?;
        let schedule = self.lr_schedule(train.steps, &batches);
        let LrSchedule {
            warmup_samples,
            decay_samples,
            decay,
            ..
        } = schedule;
        let (key, warmup) = self.warmup();
        let rule = format!("more than {key} {warmup}");
        // A decay that is not set follows the length of the run, however short that is.
        if let Some(steps) = self.decay_steps {
            let ok = batches.samples_after(steps) > warmup_samples;
            require(ok, "optimizer.decay_steps", steps, rule.clone())?;
        }
        if let Some(samples) = self.decay_samples {
            require(
                samples > warmup_samples,
                "optimizer.decay_samples",
                samples,
                rule,
            )?;
        }
        let needs_warmup = self.lr_decay_style == LrDecayStyle::InverseSquareRoot;
        let rule = "more than 0 samples if optimizer.lr_decay_style is inverse_square_root, \
                   which scales with it";
        require(!needs_warmup || warmup_samples > 0, key, warmup, rule)?;
        if let Decay::Wsd { samples, .. } = decay {
            let stable = decay_samples - warmup_samples;
            let (key, given, most) = match self.wsd_decay_steps {
                Some(steps) => {
                    let most = stable / batches.largest() as u64;
                    (
                        "optimizer.wsd_decay_steps",
                        steps,
                        format!("{most} updates"),
                    )
                }
                None => (
                    "optimizer.wsd_decay_samples",
                    samples,
                    format!("{stable} samples"),
                ),
            };
            let rule = format!(
                "at most {most}, the number between the warm-up and the end of \
                               the decay"
            );
            require(samples <= stable, key, given, rule)?;
        }
        Ok(())
    }

    /// The key that determines the warm-up, and its value.
    fn warmup(&self) -> (&'static str, String) {
        match (self.warmup_samples, self.warmup_fraction) {
            (Some(samples), _) => ("optimizer.warmup_samples", samples.to_string()),
            (None, Some(fraction)) => ("optimizer.warmup_fraction", fraction.to_string()),
            (None, None) => ("optimizer.warmup_steps", self.warmup_steps.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case("lr = 0", "`optimizer.lr` is 0: it must be more than 0 and finite")]
    #[case("lr = inf", "`optimizer.lr` is inf: it must be more than 0 and finite")]
    #[case(
        "min_lr = 1",
        "`optimizer.min_lr` is 1: it must be from 0 to optimizer.lr 0.003; lower"
    )]
    #[case(
        "lr = 1e-4",
        "is 0.0003: it must be from 0 to optimizer.lr 0.0001; that is its default, so set optimizer.min_lr too, for example to 1e-5"
    )]
    #[case(
        "weight_decay_steps = 0",
        "`optimizer.weight_decay_steps` is 0: it must be at least 1"
    )]
    #[case(
        "init_lr = -0.1",
        "`optimizer.init_lr` is -0.1: it must be from 0 to optimizer.lr"
    )]
    #[case(
        "decoupled_lr = 0",
        "`optimizer.decoupled_lr` is 0: it must be more than 0"
    )]
    #[case(
        "decoupled_lr = 1e-4\ndecoupled_min_lr = 1e-3",
        "`optimizer.decoupled_min_lr` is 0.001: it must be from 0 to optimizer.decoupled_lr 0.0001"
    )]
    #[case(
        "weight_decay = -1",
        "`optimizer.weight_decay` is -1: it must be 0 or more and finite"
    )]
    #[case(
        "end_weight_decay = nan",
        "`optimizer.end_weight_decay` is NaN: it must be 0 or more"
    )]
    #[case("weight_decay_style = 'square'", "unknown variant `square`")]
    #[case("lr_decay_style = 'cosin'", "unknown variant `cosin`")]
    #[case("wsd_decay_style = 'sqrt'", "unknown variant `sqrt`")]
    #[case(
        "decay_steps = 20",
        "`optimizer.decay_steps` is 20: it must be more than optimizer.warmup_steps 20"
    )]
    #[case(
        "warmup_samples = 800\ndecay_samples = 800",
        "`optimizer.decay_samples` is 800: it must be more than optimizer.warmup_samples 800"
    )]
    #[case(
        "decay_steps = 300\ndecay_samples = 800",
        "`optimizer.decay_samples` is given: it must be absent if optimizer.decay_steps is"
    )]
    #[case(
        "warmup_samples = 8\nwarmup_fraction = 0.1",
        "`optimizer.warmup_fraction` is given: it must be absent if optimizer.warmup_samples is"
    )]
    #[case(
        "warmup_fraction = 1",
        "`optimizer.warmup_fraction` is 1: it must be at least 0 and less"
    )]
    #[case(
        "lr_decay_style = 'inverse_square_root'\nwarmup_steps = 0",
        "`optimizer.warmup_steps` is 0: it must be more than 0 samples if"
    )]
    #[case(
        "lr_decay_style = 'wsd'\ndecay_steps = 1200\nwsd_decay_steps = 1181",
        "`optimizer.wsd_decay_steps` is 1181: it must be at most 1180 updates, the number between"
    )]
    #[case(
        "lr_decay_style = 'wsd'\ndecay_steps = 1200\nwsd_decay_samples = 9441",
        "`optimizer.wsd_decay_samples` is 9441: it must be at most 9440 samples, the number between"
    )]
    #[case(
        "lr_decay_style = 'inverse_square_root'\nwarmup_samples = 0",
        "`optimizer.warmup_samples` is 0: it must be more than 0 samples if"
    )]
    #[case(
        "decoupled_min_lr = 1",
        "`optimizer.decoupled_min_lr` is 1: it must be from 0 to optimizer.lr 0.003"
    )]
    #[case(
        "warmup_steps = 9223372036854775807\ndecay_steps = 9223372036854775807",
        "`optimizer.decay_steps` is 9223372036854775807: it must be more than optimizer.warmup_steps"
    )]
    #[case(
        "lr_decay_style = 'wsd'\nwsd_decay_steps = 1\nwsd_decay_samples = 8",
        "`optimizer.wsd_decay_samples` is given: it must be absent"
    )]
    fn a_schedule_that_cannot_be_is_refused(#[case] lines: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_text("s.toml", &format!("[optimizer]\n{lines}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}
