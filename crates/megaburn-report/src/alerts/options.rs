//! Which alerts a run has.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::webhook::Webhook;

/// What an alert is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AlertEvent {
    /// The loss of a step is much larger than that of the steps before.
    Spike,
    /// The loss or the gradient of a step is not finite, which ends the run.
    Nan,
    /// No step has ended for a long time.
    Stall,
    /// The run has done its last step.
    Finish,
    /// The run ended with an error.
    Failure,
}

impl AlertEvent {
    /// All events, in order.
    pub const ALL: [Self; 5] = [
        Self::Spike,
        Self::Nan,
        Self::Stall,
        Self::Finish,
        Self::Failure,
    ];

    /// The name in configurations and in alerts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spike => "spike",
            Self::Nan => "nan",
            Self::Stall => "stall",
            Self::Finish => "finish",
            Self::Failure => "failure",
        }
    }
}

/// Which alerts there are, and who hears of them.
#[derive(Clone, Debug)]
pub struct AlertOptions {
    /// The run's folder.
    pub dir: PathBuf,
    /// The run's id.
    pub run_id: String,
    /// The number of this start of the run.
    pub start_number: u64,
    /// A command of the shell, which reads the alert on its standard input.
    pub command: Option<String>,
    /// A URL that the alert is posted to.
    pub webhook: Option<Webhook>,
    /// The events that cause alerts.
    pub on: Vec<AlertEvent>,
    /// The factor on the mean loss of the 16 steps before above which a loss is a spike.
    pub loss_spike: f64,
    /// The time without the end of a step after which the run stalls.
    pub stall: Duration,
}

impl AlertOptions {
    /// Alerts of all events of the run `run_id` in `dir`, without a listener.
    pub fn new(dir: impl Into<PathBuf>, run_id: impl Into<String>, start_number: u64) -> Self {
        Self {
            dir: dir.into(),
            run_id: run_id.into(),
            start_number,
            command: None,
            webhook: None,
            on: AlertEvent::ALL.to_vec(),
            loss_spike: 1.5,
            stall: Duration::from_secs(600),
        }
    }

    /// Sets the command that alerts are passed to.
    #[must_use]
    pub fn with_command(mut self, command: Option<String>) -> Self {
        self.command = command;
        self
    }

    /// Sets the URL that alerts are posted to.
    #[must_use]
    pub fn with_webhook(mut self, webhook: Option<Webhook>) -> Self {
        self.webhook = webhook;
        self
    }

    /// Sets the events that cause alerts.
    #[must_use]
    pub fn with_events(mut self, on: Vec<AlertEvent>) -> Self {
        self.on = on;
        self
    }

    /// Sets what counts as a spike and as a stall.
    #[must_use]
    pub fn with_limits(mut self, loss_spike: f64, stall: Duration) -> Self {
        self.loss_spike = loss_spike;
        self.stall = stall;
        self
    }
}
