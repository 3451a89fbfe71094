//! The section `[optimizer]` that describes optimizer and schedules of Megatron-LM.

use megaburn_optim::{WeightDecayStyle, WsdStyle};
use megaburn_torch::pickle::Value;

use super::{args::Args, error::MegatronError, schedule_state::ScheduleState};
use crate::config::{LrDecayStyle, OptimizerConfig, OptimizerName, ScheduleAt};

/// The schedules of learning rate and weight decay. Their lengths are in samples.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedules<'a> {
    args: Args<'a>,
    state: ScheduleState<'a>,
    /// Whether the state of the optimizer is left out.
    weights_only: bool,
}

impl<'a> Schedules<'a> {
    pub(super) fn of(
        args: Args<'a>,
        common: Value<'a>,
        weights_only: bool,
    ) -> Result<Self, MegatronError> {
        let state = ScheduleState::of(args, common, weights_only)?;
        Ok(Self {
            args,
            state,
            weights_only,
        })
    }

    fn number(&self, name: &str) -> Result<f64, MegatronError> {
        self.state.number(name)
    }

    fn samples(&self, name: &str) -> Result<u64, MegatronError> {
        let found = whole(self.number(name)?);
        let what = format!("whole number `opt_param_scheduler.{name}`");
        found.ok_or_else(|| self.args.missing(&what, "the schedule needs it"))
    }

    /// The samples of all updates so far.
    pub(super) fn num_samples(&self) -> Result<u64, MegatronError> {
        self.samples("num_steps")
    }

    /// The section `[optimizer]` with these schedules, for batches of `batch` samples.
    pub(super) fn optimizer(
        &self,
        batch: usize,
        notes: &mut Vec<String>,
    ) -> Result<OptimizerConfig, MegatronError> {
        let args = self.args;
        let why = "megaburn continues adam with decoupled weight decay only";
        args.only_text("optimizer", &["adam"], why)?;
        if args.get("decoupled_weight_decay").is_some() && !args.flag("decoupled_weight_decay")? {
            return Err(args.refused("decoupled_weight_decay", why));
        }
        let why = "megaburn decays the weights of two and more dims only";
        args.off(&["apply_wd_to_qk_layernorm"], why)?;
        args.unset(&["no_weight_decay_cond_type"], why)?;
        if !self.weights_only {
            let why = "the state of the optimizer is not f32, which is all that is converted; \
                import it with --weights-only";
            args.off(&["use_precision_aware_optimizer"], why)?;
        }
        let (lr_decay_style, wsd) = self.style()?;
        let (start, end) = (self.number("start_wd")?, self.number("end_wd")?);
        let decay = (start != end).then_some(end);
        if decay.is_some() && args.get("rampup_batch_size").is_some() {
            let why = format!(
                "the weight decay changes from {start} to {end} over samples, which megaburn counts \
                in updates of one size; set --start-weight-decay and --end-weight-decay to one value"
            );
            return Err(args.refused("rampup_batch_size", why));
        }
        let (warmup_samples, warmup_fraction) = self.warmup(notes)?;
        let defaults = OptimizerConfig::default();
        Ok(OptimizerConfig {
            name: OptimizerName::AdamW,
            lr: self.number("max_lr")?,
            min_lr: self.number("min_lr")?,
            init_lr: args.optional_number("lr_warmup_init")?.unwrap_or(0.0),
            lr_decay_style,
            schedule_at: ScheduleAt::Start,
            warmup_steps: 0,
            warmup_samples,
            warmup_fraction,
            decay_samples: Some(self.samples("lr_decay_steps")?),
            wsd_decay_style: wsd.map_or(WsdStyle::default(), |(style, _)| style),
            wsd_decay_samples: wsd.map(|(_, samples)| samples),
            decoupled_lr: args.optional_number("decoupled_lr")?,
            decoupled_min_lr: args.optional_number("decoupled_min_lr")?,
            beta1: args.number("adam_beta1")?,
            beta2: args.number("adam_beta2")?,
            eps: args.number("adam_eps")?,
            weight_decay: start,
            end_weight_decay: decay,
            weight_decay_steps: decay.map(|_| self.weight_decay_steps(batch)).transpose()?,
            weight_decay_style: match self.state.text("wd_incr_style")? {
                "cosine" => WeightDecayStyle::Cosine,
                _ => WeightDecayStyle::Linear,
            },
            clip_grad: args.number("clip_grad")?,
            qk_clip: args.flag("qk_clip")?,
            qk_clip_alpha: args
                .optional_number("qk_clip_alpha")?
                .unwrap_or(defaults.qk_clip_alpha),
            qk_clip_threshold: args
                .optional_number("qk_clip_threshold")?
                .unwrap_or(defaults.qk_clip_threshold),
            ..defaults
        })
    }

    /// The samples of the warm-up, or its fraction of the decay if it has no whole number of them.
    ///
    /// Megatron-LM does not round the product of `lr_warmup_fraction` and `lr_decay_steps`.
    fn warmup(&self, notes: &mut Vec<String>) -> Result<(Option<u64>, Option<f64>), MegatronError> {
        let (name, args) = ("lr_warmup_steps", self.args);
        let samples = self.number(name)?;
        let is_close = |other: f64| (samples - other).abs() <= 1e-9 * samples.abs();
        let nearest = samples.round();
        if let Some(nearest) = whole(nearest).filter(|_| is_close(nearest)) {
            return Ok((Some(nearest), None));
        }
        let decay = self.number("lr_decay_steps")?;
        let fraction = args.optional_number("lr_warmup_fraction")?;
        match fraction.filter(|of| (0.0..1.0).contains(of) && is_close(of * decay)) {
            Some(fraction) => {
                notes.push(format!(
                    "argument `lr_warmup_fraction` is {fraction}: the warm-up of {samples} samples is \
                    rounded to {nearest}"
                ));
                Ok((None, Some(fraction)))
            }
            None => {
                let why = format!(
                    "it is {samples}, which is not `lr_warmup_fraction` of `lr_decay_steps` either"
                );
                Err(args.missing(&format!("whole number `opt_param_scheduler.{name}`"), &why))
            }
        }
    }

    /// How the learning rate decays, and for `WSD` the shape and the samples of its final decay.
    fn style(&self) -> Result<(LrDecayStyle, Option<(WsdStyle, u64)>), MegatronError> {
        let args = self.args;
        let style = match self.state.text("lr_decay_style")? {
            "constant" => LrDecayStyle::Constant,
            "linear" => LrDecayStyle::Linear,
            "cosine" => LrDecayStyle::Cosine,
            "inverse-square-root" => LrDecayStyle::InverseSquareRoot,
            "WSD" => LrDecayStyle::Wsd,
            _ => return Err(args.refused("lr_decay_style", "megaburn does not have it")),
        };
        if style != LrDecayStyle::Wsd {
            return Ok((style, None));
        }
        let shape = match args.text("lr_wsd_decay_style")? {
            "exponential" => WsdStyle::Exponential,
            "linear" => WsdStyle::Linear,
            "cosine" => WsdStyle::Cosine,
            "minus_sqrt" => WsdStyle::MinusSqrt,
            _ => return Err(args.refused("lr_wsd_decay_style", "megaburn does not have it")),
        };
        let samples = match args.optional_size("lr_wsd_decay_samples")? {
            Some(samples) => samples,
            None => {
                let names = ["lr_wsd_decay_iters", "global_batch_size"];
                names
                    .iter()
                    .try_for_each(|name| args.size(name).map(|_| ()))?;
                args.product(&names)?
            }
        };
        Ok((style, Some((shape, samples as u64))))
    }

    fn weight_decay_steps(&self, batch: usize) -> Result<u64, MegatronError> {
        let samples = self.samples("wd_incr_steps")?;
        if samples.is_multiple_of(batch as u64) {
            return Ok(samples / batch as u64);
        }
        let why = format!(
            "the weight decay changes over {samples} samples, which are no whole number of \
            updates of this size"
        );
        Err(self.args.refused("global_batch_size", why))
    }
}

/// A number without a fraction that is at least 0.
fn whole(number: f64) -> Option<u64> {
    let is_whole = number.fract() == 0.0 && (0.0..=2f64.powi(53)).contains(&number);
    is_whole.then_some(number as u64)
}
