//! What a resume converts.

use std::collections::BTreeSet;

use burn::tensor::DType;
use megaburn_checkpoint::Checkpoint;
use megaburn_optim::{Moment, StateDtype};

use crate::{
    config::Dtype,
    trainer::{Trainer, delayed_scales::ResumedAmaxes, save::TrainerState},
};

/// What a checkpoint holds in another form than the run that resumes from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversions {
    /// The layout and the ZeRO stage that wrote the checkpoint, if they are not the run's.
    pub layout: Option<String>,
    /// The keys of the types in which this run keeps fewer bits than the checkpoint has. The values
    /// were rounded, which cannot be undone.
    pub rounded: Vec<&'static str>,
    /// The keys of the types in which this run keeps more bits than the checkpoint has.
    pub widened: Vec<&'static str>,
    /// The largest magnitudes of delayed scaling.
    pub amaxes: ResumedAmaxes,
    /// What becomes of the loss scale, which only f16 has.
    pub loss_scale: Option<LossScaleConversion>,
}

/// What becomes of the loss scale of a run that changes between f16 and another type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScaleConversion {
    /// That of the checkpoint is dropped, because the run has none.
    Dropped,
    /// The checkpoint has none, and the run starts with this one.
    Starts(f64),
}

impl Conversions {
    /// A line for each conversion.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        let layout = self.layout.iter().map(|layout| {
            format!(
                "the checkpoint was written under {layout}: each rank read the part that it needs"
            )
        });
        let rounded = self
            .rounded
            .iter()
            .map(|key| format!("the checkpoint has a higher precision than {key}: it was rounded"));
        let widened = self.widened.iter().map(|key| {
            format!("the checkpoint has a lower precision than {key}: its values were kept")
        });
        let ResumedAmaxes { dropped, missing } = self.amaxes;
        let dropped = (dropped > 0).then(|| {
            format!(
                "the checkpoint has the largest magnitudes of {dropped} matrices for delayed \
                scaling: they are dropped, because this run does not use them"
            )
        });
        let missing = (missing > 0).then(|| {
            format!(
                "the checkpoint lacks the largest magnitudes of {missing} matrices for delayed \
                scaling: their first scales follow the matrices themselves"
            )
        });
        let loss_scale = self.loss_scale.map(|conversion| match conversion {
            LossScaleConversion::Dropped => {
                "the checkpoint has a loss scale: it is dropped, because only train.dtype f16 uses \
                one"
                .to_string()
            }
            LossScaleConversion::Starts(scale) => {
                format!("the checkpoint has no loss scale: it starts at {scale}")
            }
        });
        let lines = layout.chain(rounded).chain(widened);
        lines.chain(dropped).chain(missing).chain(loss_scale)
    }
}

impl Trainer {
    pub(super) fn conversions(
        &self,
        checkpoint: &Checkpoint,
        saved: &TrainerState,
        amaxes: ResumedAmaxes,
    ) -> Conversions {
        let mut found = Conversions {
            layout: self.core.other_layout(checkpoint),
            amaxes,
            loss_scale: match (&saved.loss_scaler, &self.core.loss_scaler) {
                (Some(_), None) => Some(LossScaleConversion::Dropped),
                (None, Some(mine)) => Some(LossScaleConversion::Starts(mine.scale())),
                _ => None,
            },
            ..Conversions::default()
        };
        let f32_params: BTreeSet<String> = self.model().f32_params().collect();
        let optimizer = &self.core.config.optimizer;
        let main_params = match optimizer.main_params_dtype {
            Dtype::Bf16 => StateDtype::Bf16,
            Dtype::F32 | Dtype::F16 => StateDtype::F32,
        };
        let kept = [
            ("optimizer.main_params_dtype", "model", main_params),
            (
                "optimizer.exp_avg_dtype",
                Moment::ExpAvg.name(),
                optimizer.exp_avg_dtype,
            ),
            (
                "optimizer.exp_avg_sq_dtype",
                Moment::ExpAvgSq.name(),
                optimizer.exp_avg_sq_dtype,
            ),
            (
                "optimizer.momentum_dtype",
                Moment::MomentumBuffer.name(),
                optimizer.momentum_dtype,
            ),
        ];
        for (key, prefix, kept) in kept {
            let names = checkpoint.manifest().tensors.keys();
            let is_own = |name: &&String| {
                let path = name
                    .strip_prefix(prefix)
                    .and_then(|rest| rest.strip_prefix('.'));
                // Some parameters are f32 in every run.
                path.is_some_and(|path| !f32_params.contains(path))
            };
            let mut stored = names
                .filter(is_own)
                .filter_map(|name| checkpoint.dtype(name).ok());
            // Moments in 8 bits are written as the f32 numbers that they are.
            let recorded =
                checkpoint.trainer()["config"].pointer(&format!("/{}", key.replace('.', "/")));
            let was_fp8 = recorded.is_some_and(|dtype| dtype == "fp8");
            match kept {
                StateDtype::Fp8 if !was_fp8 && stored.next().is_some() => found.rounded.push(key),
                StateDtype::Bf16 if stored.any(|dtype| dtype == DType::F32) => {
                    found.rounded.push(key);
                }
                StateDtype::F32 if stored.any(|dtype| was_fp8 || dtype == DType::BF16) => {
                    found.widened.push(key);
                }
                _ => {}
            }
        }
        found
    }
}
