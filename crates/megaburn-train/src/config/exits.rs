//! When a run stops before its last step, and its exit code then.

use super::{TrainingConfig, require::require};
use crate::error::TrainError;

/// Whether a code has no other meaning: the codes of [`Exit`](crate::Exit), of a panic and of
/// shells are taken.
fn is_free(code: u8) -> bool {
    code == 0 || (code > 4 && code != 101 && code < 126)
}

impl TrainingConfig {
    pub(super) fn validate_exits(&self) -> Result<(), TrainError> {
        let code = self.stopped_exit_code;
        let rule = "0, or from 5 to 125 except 101: the other codes have a meaning";
        require(is_free(code), "train.stopped_exit_code", code, rule)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case(
        "train.stopped_exit_code = 4",
        "`train.stopped_exit_code` is 4: it must be 0, or from 5 to 125"
    )]
    #[case("train.stopped_exit_code = 101", "is 101")]
    #[case("train.stopped_exit_code = 143", "is 143")]
    #[case(
        "train.exit_after_minutes = -1",
        "`train.exit_after_minutes` is -1: it must be 0 or more"
    )]
    #[case("train.stopped_exit_code = 75", "")]
    #[case("train.exit_at_step = 7", "")]
    fn a_code_that_means_something_else_is_refused(#[case] line: &str, #[case] message: &str) {
        let layers = ConfigLayers::new()
            .with_text("exits.rs", line)
            .and_then(ConfigLayers::load);
        let found = layers
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        assert!(
            found.contains(message) && found.is_empty() == message.is_empty(),
            "{found}"
        );
    }
}
