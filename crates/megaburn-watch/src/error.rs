use std::{io, path::PathBuf};

use thiserror::Error;

/// Why runs cannot be watched.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum WatchError {
    #[error("give at least one folder of a run (its `run.dir`), or a folder with folders of runs")]
    NoRuns,
    #[error(
        "`{}` does not exist, and neither does the folder that would hold it: give the folder of a \
        run (its `run.dir`)",
        path.display()
    )]
    Absent { path: PathBuf },
    #[error("`{}` is a file: give the folder of a run (its `run.dir`)", path.display())]
    NotAFolder { path: PathBuf },
    #[error(
        "`{}` is neither the folder of a run nor a folder with folders of runs: it has no \
        metrics.jsonl (it contains {names}); give the `run.dir` of a run",
        path.display()
    )]
    NotARun { path: PathBuf, names: String },
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "port {port} of {host} is in use, maybe by another `megaburn watch`: give another with \
        `--port P`; with `--port 0` any free one is taken"
    )]
    PortInUse { host: String, port: u16 },
    #[error(
        "cannot listen on {host}, port {port}: {source}; give an address of this host with `--host`"
    )]
    Listen {
        host: String,
        port: u16,
        source: io::Error,
    },
    #[error("cannot start a thread of the server: {source}")]
    Thread { source: io::Error },
}

impl WatchError {
    /// Whether the folders or the address are wrong, so that the same command fails again.
    pub fn is_bad_input(&self) -> bool {
        !matches!(self, Self::PortInUse { .. } | Self::Thread { .. })
    }
}
