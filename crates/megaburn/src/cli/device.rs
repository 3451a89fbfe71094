//! `--device`, and the launch of one process per rank for GPUs.

use std::{ffi::OsString, process::ExitCode};

use clap::ValueEnum;
use megaburn_launch::{LaunchOptions, Outcome, launch};
use megaburn_train::{TrainError, device::DeviceChoice};

use super::exit_code;

/// The device that the ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// The CPU of this machine, as threads or processes.
    Cpu,
    /// NVIDIA GPUs, one process per GPU.
    Cuda,
}

impl DeviceArg {
    /// The name of this choice, also in `run.device`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl From<DeviceArg> for DeviceChoice {
    fn from(device: DeviceArg) -> Self {
        match device {
            DeviceArg::Cpu => Self::Cpu,
            DeviceArg::Cuda => Self::Cuda,
        }
    }
}

/// Runs this program with `arguments` as `ranks` ranks on this host, until all have ended.
pub(super) fn launch_again(
    ranks: usize,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<ExitCode, TrainError> {
    let options = LaunchOptions::this_program(ranks, arguments);
    watch(&options).map(|outcome| exit_code(outcome.exit_code()))
}

/// Like [`launch_again`], for a caller that reports the outcome itself.
pub(super) fn launch_silently(
    ranks: usize,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Outcome, TrainError> {
    watch(&LaunchOptions::this_program(ranks, arguments).without_cause_report())
}

fn watch(options: &LaunchOptions) -> Result<Outcome, TrainError> {
    launch(options).map_err(|error| TrainError::Launch {
        why: error.to_string(),
    })
}
