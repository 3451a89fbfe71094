//! The numbers that describe the schedules of Megatron-LM.

use megaburn_torch::pickle::Value;

use super::{args::Args, error::MegatronError};

/// The state of the schedules by its names in Megatron-LM. Lengths are in samples.
///
/// Source: Megatron-LM, `megatron/core/optimizer_param_scheduler.py`, and
/// `get_optimizer_param_scheduler` in `megatron/training/training.py`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScheduleState<'a> {
    args: Args<'a>,
    /// `opt_param_scheduler` in `common.pt`. A checkpoint of `--no-save-optim` has none; then the
    /// arguments say what the schedules begin with.
    saved: Option<Value<'a>>,
}

impl<'a> ScheduleState<'a> {
    /// The state that a checkpoint has. With `weights_only` the arguments suffice.
    ///
    /// # Errors
    /// It has no state.
    pub(super) fn of(
        args: Args<'a>,
        common: Value<'a>,
        weights_only: bool,
    ) -> Result<Self, MegatronError> {
        let saved = common.get("opt_param_scheduler");
        if saved.is_none() && !weights_only {
            let why = "it has no state of the schedules; import it with --weights-only, or save it \
                without --no-save-optim";
            return Err(args.missing("`opt_param_scheduler`", why));
        }
        Ok(Self { args, saved })
    }

    pub(super) fn number(&self, name: &str) -> Result<f64, MegatronError> {
        match self.saved {
            Some(saved) => self.found(name, saved.get(name).and_then(|value| value.as_f64())),
            None => self.number_of_arguments(name),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, MegatronError> {
        match self.saved {
            Some(saved) => self.found(name, saved.get(name).and_then(|value| value.as_str())),
            None => self.args.text(match name {
                "wd_incr_style" => "weight_decay_incr_style",
                name => name,
            }),
        }
    }

    fn found<T>(&self, name: &str, found: Option<T>) -> Result<T, MegatronError> {
        let what = format!("`opt_param_scheduler.{name}`");
        found.ok_or_else(|| self.args.missing(&what, "the schedule needs it"))
    }

    fn number_of_arguments(&self, name: &str) -> Result<f64, MegatronError> {
        let args = self.args;
        match name {
            "max_lr" => args.number("lr"),
            "min_lr" => Ok(args.optional_number("min_lr")?.unwrap_or(0.0)),
            "start_wd" => self.weight_decay("start_weight_decay"),
            "end_wd" => self.weight_decay("end_weight_decay"),
            "lr_decay_steps" => match self.samples("lr_decay_iters", "lr_decay_samples")? {
                Some(samples) => Ok(samples),
                None => self.all_samples(),
            },
            "wd_incr_steps" => self.all_samples(),
            "lr_warmup_steps" => match args.optional_number("lr_warmup_fraction")? {
                Some(fraction) => Ok(fraction * self.number("lr_decay_steps")?),
                None => {
                    let samples = self.samples("lr_warmup_iters", "lr_warmup_samples")?;
                    Ok(samples.unwrap_or(0.0))
                }
            },
            name => self.found(name, None),
        }
    }

    fn weight_decay(&self, name: &str) -> Result<f64, MegatronError> {
        match self.args.optional_number(name)? {
            Some(decay) => Ok(decay),
            None => self.args.number("weight_decay"),
        }
    }

    /// The samples of the whole run.
    fn all_samples(&self) -> Result<f64, MegatronError> {
        let found = self.samples("train_iters", "train_samples")?;
        let why = "the length of the schedules follows from it";
        found.ok_or_else(|| self.args.missing("argument `train_iters`", why))
    }

    /// A length that is in samples for a run of `--train-samples`, and otherwise in iterations. (A run
    /// of `--train-samples` records `train_iters` too.)
    fn samples(&self, iterations: &str, samples: &str) -> Result<Option<f64>, MegatronError> {
        let args = self.args;
        if args.get("train_samples").is_some() {
            return Ok(args.optional_size(samples)?.map(|samples| samples as f64));
        }
        if args.get(iterations).is_none() {
            return Ok(None);
        }
        args.size("global_batch_size")?;
        let samples = args.product(&[iterations, "global_batch_size"])?;
        Ok(Some(samples as f64))
    }
}
