//! The number of samples of a step, and how they are split into micro-batches.

use megaburn_data::BatchSchedule;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TrainingConfig, require::require};
use crate::TrainError;

/// `[train.batch_ramp]`: a batch that grows to `train.global_batch` over the first samples
/// (Megatron-LM's `--rampup-batch-size`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct BatchRampConfig {
    /// Samples of the first steps, over all ranks: at most `train.global_batch`. It must be a
    /// multiple of `train.micro_batch` times the data-parallel degree.
    #[schemars(extend("minimum" = 1))]
    pub start: usize,
    /// Samples by which the batch grows at a time. It must divide `train.global_batch - start`, and
    /// be a multiple of `train.micro_batch` times the data-parallel degree.
    #[schemars(extend("minimum" = 1))]
    pub increment: usize,
    /// Training samples over which the batch grows from `start` to `train.global_batch`.
    pub samples: u64,
}

impl Default for BatchRampConfig {
    fn default() -> Self {
        Self {
            start: 4,
            increment: 4,
            samples: 1000,
        }
    }
}

impl BatchRampConfig {
    pub(super) fn validate(&self, end: usize) -> Result<(), TrainError> {
        let Self {
            start, increment, ..
        } = *self;
        let rule = format!("at most train.global_batch {end}");
        require(start <= end, "train.batch_ramp.start", start, rule)?;
        let distance = end - start;
        let rule = format!(
            "a divisor of {distance}, the samples from train.batch_ramp.start to \
                           train.global_batch"
        );
        let ok = distance.is_multiple_of(increment);
        require(ok, "train.batch_ramp.increment", increment, rule)
    }
}

impl TrainingConfig {
    /// The number of samples of each step.
    ///
    /// # Errors
    /// The batch cannot grow from `start` to `global_batch` in steps of `increment`.
    pub fn batch_schedule(&self) -> Result<BatchSchedule, TrainError> {
        Ok(match self.batch_ramp {
            Some(BatchRampConfig {
                start,
                increment,
                samples,
            }) => BatchSchedule::ramp(start, increment, samples, self.global_batch)?,
            None => BatchSchedule::constant(self.global_batch)?,
        })
    }

    /// Micro-batches of a step on each of `dp` data-parallel ranks, once the batch ramp is over.
    ///
    /// # Errors
    /// The global batch, or the start or increment of its ramp, is not a multiple of `micro_batch *
    /// dp`.
    pub fn num_micro_batches(&self, dp: usize) -> Result<usize, TrainError> {
        let Self {
            global_batch,
            micro_batch,
            ..
        } = *self;
        let samples = micro_batch.saturating_mul(dp);
        let rule = format!("a multiple of train.micro_batch {micro_batch} x dp {dp} = {samples}");
        let fits = |batch: usize| samples > 0 && batch.is_multiple_of(samples);
        require(
            fits(global_batch),
            "train.global_batch",
            global_batch,
            rule.clone(),
        )?;
        if let Some(BatchRampConfig {
            start, increment, ..
        }) = self.batch_ramp
        {
            require(fits(start), "train.batch_ramp.start", start, rule.clone())?;
            require(
                fits(increment),
                "train.batch_ramp.increment",
                increment,
                rule,
            )?;
        }
        Ok(global_batch / samples)
    }

    /// The distinct numbers of micro-batches that steps of a run have on each of `dp` data-parallel
    /// ranks.
    ///
    /// # Errors
    /// As [`num_micro_batches`](Self::num_micro_batches).
    pub(super) fn all_num_micro_batches(
        &self,
        dp: usize,
    ) -> Result<impl Iterator<Item = usize>, TrainError> {
        let last = self.num_micro_batches(dp)?;
        let samples = self.micro_batch * dp;
        let ramp = self.batch_ramp.as_ref();
        let (first, step) = ramp.map_or((last, 1), |ramp| {
            (ramp.start / samples, (ramp.increment / samples).max(1))
        });
        Ok((first..=last).step_by(step))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{ConfigLayers, Exit};

    #[rstest]
    #[case(32, 8, 2, 2)]
    #[case(8, 2, 2, 2)]
    #[case(15, 5, 1, 3)]
    fn the_global_batch_is_cut_into_micro_batches(
        #[case] global_batch: usize,
        #[case] micro_batch: usize,
        #[case] dp: usize,
        #[case] expected: usize,
    ) {
        let config = TrainingConfig {
            global_batch,
            micro_batch,
            ..TrainingConfig::default()
        };
        assert_eq!(config.num_micro_batches(dp).unwrap(), expected);
    }

    #[rstest]
    #[case("start = 0", "`train.batch_ramp.start` is 0: it must be at least 1")]
    #[case(
        "increment = 0",
        "`train.batch_ramp.increment` is 0: it must be at least 1"
    )]
    #[case(
        "start = 12",
        "`train.batch_ramp.start` is 12: it must be at most train.global_batch 8"
    )]
    #[case(
        "start = 2\nincrement = 4",
        "`train.batch_ramp.increment` is 4: it must be a divisor of 6, the samples from"
    )]
    #[case(
        "start = 3\nincrement = 5",
        "`train.batch_ramp.start` is 3: it must be a multiple of train.micro_batch 2 x dp 1 = 2"
    )]
    #[case(
        "start = 8\nincrement = 3",
        "`train.batch_ramp.increment` is 3: it must be a multiple of train.micro_batch 2 x dp 1"
    )]
    #[case("samles = 3", "`train.batch_ramp.samles`")]
    fn a_ramp_that_cannot_be_is_refused(#[case] lines: &str, #[case] message: &str) {
        let text = format!("[train.batch_ramp]\n{lines}");
        let layers = ConfigLayers::new().with_text("b.toml", &text);
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn every_batch_of_a_ramp_must_be_cut_by_the_layout() {
        let layers = ConfigLayers::new()
            .with_set("train.batch_ramp.samples=100")
            .unwrap();
        let config = layers
            .with_set("train.micro_batch=1")
            .unwrap()
            .load()
            .unwrap();
        assert_eq!(config.train.num_micro_batches(4).unwrap(), 2);
        let error = config.train.num_micro_batches(8).unwrap_err().to_string();
        assert!(
            error.contains("`train.batch_ramp.start` is 4: it must be a multiple of"),
            "{error}"
        );
    }
}
