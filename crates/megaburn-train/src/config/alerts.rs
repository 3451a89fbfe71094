//! `[alerts]`: who hears of what happens to a run.

use std::time::Duration;

use megaburn_report::alerts::{AlertEvent, AlertOptions, Webhook};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// `[alerts]`: a command or a webhook that hears of what happens to a run. What they do, and
/// whether they fail, never changes the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct AlertsConfig {
    /// A command of the shell, which reads an alert as JSON on its standard input. It is killed
    /// after ten seconds. Default: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minLength" = 1))]
    pub command: Option<String>,
    /// A URL of plain HTTP to which an alert is posted as JSON. Default: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<String>,
    /// The events that cause alerts.
    pub on: Vec<AlertEvent>,
    /// The factor on the mean loss of the 16 steps before above which the loss of a step is a
    /// spike.
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub loss_spike: f64,
    /// Seconds without the end of a step, of an evaluation or of a checkpoint after which the run
    /// stalls. They count from the first step of a start on.
    #[schemars(extend("minimum" = 0.001, "maximum" = 1_000_000))]
    pub stall_seconds: f64,
}

impl Default for AlertsConfig {
    fn default() -> Self {
        Self {
            command: None,
            webhook: None,
            on: AlertEvent::ALL.to_vec(),
            loss_spike: 1.5,
            stall_seconds: 600.0,
        }
    }
}

impl AlertsConfig {
    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let is_heard = self.command.is_some() || self.webhook.is_some();
        let has = |event| is_heard && self.on.contains(&event);
        vec![
            ("on", is_heard, "with alerts.command or alerts.webhook"),
            (
                "loss_spike",
                has(AlertEvent::Spike),
                "with alerts.command or alerts.webhook, and \"spike\" in alerts.on",
            ),
            (
                "stall_seconds",
                has(AlertEvent::Stall),
                "with alerts.command or alerts.webhook, and \"stall\" in alerts.on",
            ),
        ]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let is_set = self.command.as_deref() != Some("");
        require(is_set, "alerts.command", "empty", "a command of the shell")?;
        if let Some(url) = &self.webhook
            && let Err(rule) = Webhook::parse(url)
        {
            require(false, "alerts.webhook", url, rule)?;
        }
        Ok(())
    }

    /// These alerts, for the start of a run.
    pub(crate) fn apply_to(&self, options: AlertOptions) -> AlertOptions {
        let webhook = self.webhook.as_deref().map(Webhook::parse);
        options
            .with_command(self.command.clone())
            // Others are refused before.
            .with_webhook(webhook.and_then(Result::ok))
            .with_events(self.on.clone())
            .with_limits(self.loss_spike, Duration::from_secs_f64(self.stall_seconds))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::{config::ConfigLayers, exit::Exit};

    #[rstest]
    #[case(
        "alerts.command=\"\"",
        "`alerts.command` is empty: it must be a command"
    )]
    #[case(
        "alerts.webhook=https://a/b",
        "`alerts.webhook` is https://a/b: it must be a URL of plain HTTP; for HTTPS set alerts.command"
    )]
    #[case(
        "alerts.webhook=a",
        "`alerts.webhook` is a: it must be a URL such as http://"
    )]
    #[case(
        "alerts.loss_spike=1",
        "`alerts.loss_spike` is 1: it must be more than 1"
    )]
    #[case(
        "alerts.stall_seconds=0",
        "`alerts.stall_seconds` is 0: it must be from 0.001"
    )]
    #[case("alerts.on=[\"nans\"]", "nans")]
    fn a_value_that_no_run_can_use_is_refused(#[case] set: &str, #[case] message: &str) {
        let layers = ConfigLayers::new().with_set(set);
        let error = layers.and_then(ConfigLayers::load).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
    }
}
