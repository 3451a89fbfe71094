//! The section `[train.batch_ramp]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// `[train.batch_ramp]`: a batch that grows to `train.global_batch` over the first samples
/// (Megatron-LM's `--rampup-batch-size`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct BatchRampConfig {
    /// Samples of the first steps, over all ranks: at most `train.global_batch`. Without
    /// `train.pad_batch`, it must be a multiple of `train.micro_batch` times the data-parallel degree.
    #[schemars(extend("minimum" = 1))]
    pub start: usize,
    /// Samples by which the batch grows at a time. It must divide `train.global_batch - start`
    /// and, without `train.pad_batch`, be a multiple of `train.micro_batch` times the data-parallel
    /// degree.
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

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
}
