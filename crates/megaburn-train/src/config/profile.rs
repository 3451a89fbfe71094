//! `[profile]`: the steps whose work is recorded.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// The most steps of a profile: a rank keeps some hundred bytes for each kernel.
const MOST_STEPS: u64 = 100;

/// `[profile]`: the steps whose work is recorded: what each rank's host and GPU did in them, as a
/// trace for Perfetto and as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct ProfileConfig {
    /// The first and the last step that are recorded, such as `"10-12"`, or one step. Default: none
    /// is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<String>,
}

impl ProfileConfig {
    /// The first and the last step that are recorded.
    ///
    /// # Errors
    /// The value is not two numbers of steps, or one.
    pub(crate) fn window(&self) -> Result<Option<[u64; 2]>, TrainError> {
        let Some(text) = &self.steps else {
            return Ok(None);
        };
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let window = match text.split_once('-') {
            Some((first, last)) => number(first).zip(number(last)),
            None => number(text).map(|step| (step, step)),
        };
        let window = window.map(<[u64; 2]>::from);
        let is_valid =
            |[first, last]: &[u64; 2]| *first > 0 && first <= last && last - first < MOST_STEPS;
        let window = window.filter(is_valid);
        let rule = format!(
            "a step or the first and the last of at most {MOST_STEPS} steps, counted from 1, such as \
            \"10-12\""
        );
        require(window.is_some(), "profile.steps", text, rule)?;
        Ok(window)
    }

    /// When keys of the section have an effect.
    pub(super) fn conditions(&self, steps: u64) -> Vec<Condition> {
        let first = self.window().ok().flatten().map_or(0, |[first, _]| first);
        vec![("steps", first <= steps, "for steps up to train.steps")]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        self.window().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case("10-12", [10, 12])]
    #[case("7", [7, 7])]
    #[case("1 - 100", [1, 100])]
    fn steps_are_a_range_or_one(#[case] text: &str, #[case] window: [u64; 2]) {
        let steps = Some(text.to_string());
        assert_eq!(ProfileConfig { steps }.window().unwrap(), Some(window));
        assert_eq!(ProfileConfig::default().window().unwrap(), None);
    }

    #[rstest]
    #[case("0-2")]
    #[case("3-2")]
    #[case("1-101")]
    #[case("ten")]
    #[case("")]
    #[case("1-2-3")]
    fn other_values_are_refused(#[case] text: &str) {
        let layers = ConfigLayers::new().with_set(&format!("profile.steps={text:?}"));
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        let message = format!("`profile.steps` is {text}: it must be a step or the first");
        assert!(error.to_string().contains(&message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}
