//! `[log]`: the metrics of a run in the formats of other programs.

use std::{io, net::TcpListener};

use megaburn_report::logs::MetricsServer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ineffective_keys::Condition, require::require};
use crate::error::TrainError;

/// `[log]`: the metrics of a run in the formats of other programs, next to `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct LogConfig {
    /// Whether event files of TensorBoard are written into the folder `tensorboard` of `run.dir`.
    pub tensorboard: bool,
    /// Whether tables are written: `metrics.csv` with a row for each step, and `evaluations.csv`.
    pub csv: bool,
    /// Whether an offline run of Weights & Biases is written into the folder `wandb` of `run.dir`,
    /// which `wandb sync` uploads.
    pub wandb: bool,
    /// The project of that run. Used with `wandb`.
    pub wandb_project: String,
    /// The port on which rank 0 serves `/metrics` for Prometheus. Default: it serves none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub prometheus_port: Option<u16>,
    /// The address of rank 0's host on which it does so; `0.0.0.0` is all of them. Used with
    /// `prometheus_port`.
    pub prometheus_host: String,
    /// Steps between lines of `metrics.jsonl` with the statistics of each layer: norm, root mean
    /// square, largest magnitude and shares of zeros and of elements that are not finite, of
    /// activations, gradients and weights. 0 writes none.
    pub layer_statistics_interval: u64,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            tensorboard: false,
            csv: false,
            wandb: false,
            wandb_project: "megaburn".into(),
            prometheus_port: None,
            prometheus_host: "0.0.0.0".into(),
            layer_statistics_interval: 0,
        }
    }
}

impl LogConfig {
    /// When keys of the section have an effect.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        vec![
            ("wandb_project", self.wandb, "with log.wandb"),
            (
                "prometheus_host",
                self.prometheus_port.is_some(),
                "with log.prometheus_port",
            ),
        ]
    }

    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let is_set = !self.wandb_project.is_empty();
        let rule = "the name of a project of Weights & Biases";
        require(is_set, "log.wandb_project", "empty", rule)?;
        let is_set = !self.prometheus_host.is_empty();
        let rule = "an address of rank 0's host, such as 0.0.0.0";
        require(is_set, "log.prometheus_host", "empty", rule)
    }

    /// Starts the server of Prometheus' metrics, if there is one.
    ///
    /// # Errors
    /// As [`check_port`](Self::check_port).
    pub(crate) fn serve(&self) -> Result<Option<MetricsServer>, TrainError> {
        self.with_port(MetricsServer::start)
    }

    /// Checks that the port for Prometheus is free.
    ///
    /// # Errors
    /// The port is in use, or the address is not one of this host.
    pub(crate) fn check_port(&self) -> Result<(), TrainError> {
        let bound = self.with_port(|host, port| TcpListener::bind((host, port)))?;
        drop(bound);
        Ok(())
    }

    /// Calls `bind` with the address, if there is a port.
    fn with_port<T>(
        &self,
        bind: impl FnOnce(&str, u16) -> io::Result<T>,
    ) -> Result<Option<T>, TrainError> {
        let Some(port) = self.prometheus_port else {
            return Ok(None);
        };
        let host = &self.prometheus_host;
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => TrainError::Invalid {
                key: "log.prometheus_port",
                value: port.to_string(),
                rule: format!("a port that is free on rank 0's host: {error}"),
            },
            _ => TrainError::Invalid {
                key: "log.prometheus_host",
                value: host.clone(),
                rule: format!("an address of rank 0's host, such as 0.0.0.0: {error}"),
            },
        };
        bind(host, port).map(Some).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::ConfigLayers, exit::Exit};

    #[test]
    fn a_port_in_use_is_refused_by_its_key() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let log = LogConfig {
            prometheus_port: Some(port),
            prometheus_host: "127.0.0.1".into(),
            ..LogConfig::default()
        };
        let error = log.check_port().unwrap_err();
        let message = format!("`log.prometheus_port` is {port}: it must be a port that is free");
        assert!(error.to_string().starts_with(&message), "{error}");
        assert_eq!(error.exit(), Exit::BadInput);
        drop(taken);
        let server = log.serve().unwrap().unwrap();
        assert_eq!(server.address().port(), port);
    }

    #[test]
    fn an_address_of_another_host_is_refused_by_its_key() {
        let log = LogConfig {
            prometheus_port: Some(9400),
            prometheus_host: "192.0.2.1".into(),
            ..LogConfig::default()
        };
        let error = log.serve().unwrap_err().to_string();
        let message = "`log.prometheus_host` is 192.0.2.1: it must be an address of rank 0's host";
        assert!(error.starts_with(message), "{error}");
    }

    #[test]
    fn a_port_is_a_number_of_a_port() {
        let set = |text: &str| {
            let layers = ConfigLayers::new().with_set(text);
            layers.and_then(ConfigLayers::load).unwrap_err().to_string()
        };
        let error = set("log.prometheus_port=0");
        assert!(error.contains("`log.prometheus_port` is 0"), "{error}");
        let error = set("log.prometheus_port=70000");
        assert!(error.contains("log.prometheus_port"), "{error}");
    }
}
