//! Makes an alert and passes it to its listeners.

use std::time::Duration;

use chrono::{SecondsFormat, Utc};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    command,
    options::{AlertEvent, AlertOptions},
};

/// An alert, as its listeners read it.
#[derive(Debug, Serialize)]
struct Alert<'a> {
    event: AlertEvent,
    /// What happened, in one line. Chat programs show this field of a webhook.
    text: String,
    /// The name of the run's folder.
    run: String,
    /// The run's folder.
    run_dir: String,
    run_id: &'a str,
    start_number: u64,
    /// The host of rank 0.
    host: String,
    /// The time in UTC, as RFC 3339.
    time: String,
    step: u64,
    /// What the event has in addition.
    #[serde(flatten)]
    details: Map<String, Value>,
}

/// The listeners of a run's alerts.
pub(super) struct Delivery {
    options: AlertOptions,
}

impl Delivery {
    pub(super) fn new(options: AlertOptions) -> Self {
        Self { options }
    }

    /// The time without progress after which the run stalls.
    pub(super) fn stall_limit(&self) -> Duration {
        match self.options.on.contains(&AlertEvent::Stall) {
            true => self.options.stall,
            // A century: a later time may not be one that the system can wait for.
            false => Duration::from_secs(100 * 365 * 86400),
        }
    }

    /// Passes an alert to the command and to the webhook. What fails is a warning.
    pub(super) fn send(
        &self,
        event: AlertEvent,
        step: u64,
        what: &str,
        details: Map<String, Value>,
    ) {
        let AlertOptions {
            dir,
            run_id,
            start_number,
            command,
            webhook,
            ..
        } = &self.options;
        let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.clone());
        let run = dir.file_name().unwrap_or_default().to_string_lossy();
        let host = nix::unistd::gethostname().unwrap_or_default();
        let alert = Alert {
            event,
            text: format!("{run}: {what}"),
            run: run.to_string(),
            run_dir: dir.display().to_string(),
            run_id,
            start_number: *start_number,
            host: host.to_string_lossy().into_owned(),
            time: Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true),
            step,
            details,
        };
        let text = serde_json::to_string(&alert).expect("texts and numbers are serializable");
        let listeners = [
            command.as_ref().map(|command| {
                let sent = command::run(command, &text);
                ("alerts.command", command.clone(), sent)
            }),
            webhook.as_ref().map(|webhook| {
                let sent = webhook.post(&text).map_err(|error| error.to_string());
                ("alerts.webhook", webhook.to_string(), sent)
            }),
        ];
        for (key, name, sent) in listeners.into_iter().flatten() {
            if let Err(why) = sent {
                let event = event.name();
                tracing::warn!("{key} `{name}` did not take the alert `{event}`: {why}");
            }
        }
    }
}
