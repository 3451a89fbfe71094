//! Why a launch fails before or while its ranks run.

use std::io;

use thiserror::Error;

use crate::child;

/// Why the ranks could not be started or watched.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum LaunchError {
    #[error("cannot launch: {why}")]
    BadOptions { why: String },
    #[error("cannot launch: no free port on this host: {0}")]
    NoPort(io::Error),
    #[error("cannot start the command: {why}")]
    NoCommand { why: String },
    #[error("cannot start the command: `{name}` is not executable")]
    NotExecutable { name: String },
    #[error("cannot keep logs: {0}")]
    Logs(io::Error),
    #[error("cannot launch: cannot generate a job token: {0}")]
    NoToken(io::Error),
    #[error("cannot start rank {rank}: {error}; the ranks that had started were stopped")]
    Start { rank: usize, error: io::Error },
    #[error("cannot watch the ranks: {0}")]
    Watch(io::Error),
    #[error("cannot listen for the launchers of other hosts on port {port}: {error}")]
    Listen { port: u16, error: io::Error },
    #[error("cannot join the job at {coordinator}: {why}")]
    Join { coordinator: String, why: String },
    #[error("the launcher of node 0 at {coordinator} refuses this one: {why}")]
    Refused { coordinator: String, why: String },
    #[error("stopped by signal {signal} while it waited for the launcher of node 0")]
    Stopped { signal: i32 },
}

impl LaunchError {
    /// The launcher's exit code; shells use the same ones for commands that cannot be started.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NoCommand { .. } => child::EXIT_NOT_FOUND,
            Self::NotExecutable { .. } => child::EXIT_CANNOT_START,
            Self::BadOptions { .. }
            | Self::NoPort(_)
            | Self::Logs(_)
            | Self::Listen { .. }
            | Self::Refused { .. } => 2,
            Self::Stopped { signal } => 128 + signal,
            Self::Start { .. } | Self::NoToken(_) | Self::Watch(_) | Self::Join { .. } => 1,
        }
    }
}
