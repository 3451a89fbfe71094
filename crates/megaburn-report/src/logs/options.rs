//! Which logs a run writes.

use std::{
    io,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use super::prometheus::MetricsServer;
use crate::error::ReportError;

/// The logs of a run.
#[derive(Debug)]
pub struct LogOptions {
    /// The run's folder.
    pub dir: PathBuf,
    /// The name that programs show the run by.
    pub run_name: String,
    /// The run's id.
    pub run_id: String,
    /// The step after which the run continues; 0 at its beginning.
    pub from_step: u64,
    /// Whether there are event files of TensorBoard.
    pub tensorboard: bool,
    /// Whether there are tables of comma-separated values.
    pub csv: bool,
    /// The offline folder of Weights & Biases, if there is one.
    pub wandb: Option<WandbOptions>,
    /// The server of Prometheus' metrics, if there is one.
    pub server: Option<MetricsServer>,
}

/// What Weights & Biases shows about a run.
#[derive(Clone, Debug, Default)]
pub struct WandbOptions {
    /// The project that the run belongs to.
    pub project: String,
    /// The configuration of the run.
    pub config: Map<String, Value>,
}

impl LogOptions {
    /// No logs, for the run `run_id` in `dir`, which continues after `from_step`. Programs show it
    /// by the name of its folder.
    pub fn new(dir: impl Into<PathBuf>, run_id: impl Into<String>, from_step: u64) -> Self {
        let dir = dir.into();
        let name = dir.file_name().unwrap_or_default();
        Self {
            run_name: name.to_string_lossy().into_owned(),
            run_id: run_id.into(),
            from_step,
            tensorboard: false,
            csv: false,
            wandb: None,
            server: None,
            dir,
        }
    }

    /// Sets whether event files of TensorBoard are written into the folder `tensorboard`.
    #[must_use]
    pub fn with_tensorboard(mut self, tensorboard: bool) -> Self {
        self.tensorboard = tensorboard;
        self
    }

    /// Sets whether `metrics.csv` and `evaluations.csv` are written.
    #[must_use]
    pub fn with_csv(mut self, csv: bool) -> Self {
        self.csv = csv;
        self
    }

    /// Sets what is written for Weights & Biases, into the folder `wandb`.
    #[must_use]
    pub fn with_wandb(mut self, wandb: Option<WandbOptions>) -> Self {
        self.wandb = wandb;
        self
    }

    /// Sets the server of Prometheus' metrics.
    #[must_use]
    pub fn with_server(mut self, server: Option<MetricsServer>) -> Self {
        self.server = server;
        self
    }

    /// Whether a log continues from the metrics of earlier starts.
    pub(super) fn has_files(&self) -> bool {
        self.tensorboard || self.csv || self.wandb.is_some()
    }

    /// The error of a file that cannot be written, inside `name` in the run's folder.
    pub(super) fn cannot_write(&self, name: &str) -> impl FnOnce(io::Error) -> ReportError {
        let path = Path::new(&self.dir).join(name);
        move |source| ReportError::Write { path, source }
    }
}
