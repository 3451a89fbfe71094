//! The logs and alerts of a start of a run.

use std::path::Path;

use megaburn_report::{
    alerts::{AlertOptions, Alerts},
    logs::{LogOptions, Logs, WandbOptions},
    metrics::read_metrics,
};

use crate::{
    config::TrainConfig,
    error::TrainError,
    run_folder::{RunFolder, names::METRICS},
};

/// Opens the logs for other programs of a run that continues after `from_step`.
///
/// # Errors
/// A file cannot be written, or the port for Prometheus is in use.
pub(super) fn open_logs(
    config: &TrainConfig,
    folder: &RunFolder,
    from_step: u64,
) -> Result<Logs, TrainError> {
    let log = &config.log;
    let dir = std::path::absolute(folder.path()).unwrap_or_else(|_| folder.path().into());
    let wandb = log.wandb.then(|| WandbOptions {
        project: log.wandb_project.clone(),
        config: match serde_json::json!(config) {
            // Commands and addresses of alerts may hold secrets.
            serde_json::Value::Object(mut config) => {
                config.remove("alerts");
                config
            }
            _ => serde_json::Map::new(),
        },
    });
    let options = LogOptions::new(dir, folder.id(), from_step)
        .with_tensorboard(log.tensorboard)
        .with_csv(log.csv)
        .with_wandb(wandb)
        .with_server(log.serve()?);
    Ok(Logs::open(options, || {
        read_metrics(folder.path().join(METRICS))
    })?)
}

/// Starts the alerts of a run.
///
/// # Errors
/// The system cannot start a thread.
pub(super) fn start_alerts(
    config: &TrainConfig,
    dir: &Path,
    run_id: String,
    start_number: u64,
) -> Result<Alerts, TrainError> {
    let options = AlertOptions::new(dir, run_id, start_number);
    let alerts = Alerts::start(config.alerts.apply_to(options));
    alerts.map_err(|error| TrainError::NoThread {
        why: error.to_string(),
    })
}
