//! `--device`, and starting the ranks that GPUs need as processes.

use std::{ffi::OsString, process::ExitCode};

use clap::ValueEnum;
use megaburn_launch::{LaunchOptions, Outcome, launch};
use megaburn_train::{TrainError, device::DeviceChoice};

use super::exit_code;

/// What the ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// Threads or processes of this machine's processor.
    Cpu,
    /// NVIDIA GPUs, one process each.
    Cuda,
}

impl DeviceArg {
    /// The name under which it is chosen, also in `run.device`.
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

/// Runs this program with `arguments` as `ranks` ranks of this host, until all have ended.
pub(super) fn launch_again(
    ranks: usize,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<ExitCode, TrainError> {
    let options = LaunchOptions::this_program(ranks, arguments);
    watch(&options).map(|outcome| exit_code(outcome.exit_code()))
}

/// As [`launch_again`], for a caller that says itself what became of the ranks.
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
