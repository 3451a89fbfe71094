//! How many checkpoints a run keeps.

use super::{TrainingConfig, require::require};
use crate::error::TrainError;

impl TrainingConfig {
    /// Checks that a checkpoint is left if the newest one is set aside as suspect.
    pub(super) fn validate_retention(&self) -> Result<(), TrainError> {
        let rule = "at least 2 with train.check_replicas_interval, because the newest checkpoint is set \
                    aside if the memory of a rank fails after it";
        let is_enough = self.check_replicas_interval == 0 || self.keep_checkpoints >= 2;
        require(
            is_enough,
            "train.keep_checkpoints",
            self.keep_checkpoints,
            rule,
        )
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case(
        "keep_checkpoints = 1",
        "`train.keep_checkpoints` is 1: it must be at least 2 with"
    )]
    #[case("keep_checkpoints = 2", "")]
    fn a_checkpoint_is_left_if_the_newest_is_set_aside(
        #[case] line: &str,
        #[case] message: &str,
        #[values(0, 7)] interval: u64,
    ) {
        let text = format!("[train]\ncheck_replicas_interval = {interval}\n{line}");
        let layers = ConfigLayers::new().with_text("retention.rs", &text);
        let found = layers.and_then(ConfigLayers::load).err();
        let found = found.map(|error| error.to_string()).unwrap_or_default();
        let message = if interval > 0 { message } else { "" };
        assert!(
            found.contains(message) && found.is_empty() == message.is_empty(),
            "{found}"
        );
    }
}
