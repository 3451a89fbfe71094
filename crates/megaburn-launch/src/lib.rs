//! Starts the ranks of one host as processes and sees to it that they end together.
//!
//! The ranks get torchrun's environment names, so the same program runs under torchrun, Slurm, MPI
//! or Kubernetes as well. Each rank is started through this very program ([`launch_child`]), which
//! asks the kernel to kill it when the launcher dies and then becomes the command; a program that
//! starts itself several times ([`LaunchOptions::this_program`]) asks for that directly. What a
//! command starts in its turn is ended by a guard (`guard.rs`) if the launcher dies.
//!
//! ```
//! use megaburn_launch::LaunchOptions;
//!
//! let options = LaunchOptions::new(4, vec!["my-program".into()])
//!     .with_nodes(2, 0)
//!     .with_master(Some("host-0".into()), Some(29500));
//! assert_eq!(options.nproc, 4);
//! ```

mod child;
mod command;
mod gpus;
mod guard;
mod logs;
mod output;
mod port;
mod queue;
mod repeats;
mod signals;
mod supervise;
mod verdict;

use std::{ffi::OsString, io, path::PathBuf, time::Duration};

use thiserror::Error;

pub use child::{launch_child, tie_to_launcher};
use megaburn_collective::{JobToken, RankEnv};
use port::ReservedPort;
pub use queue::{Output, OutputQueue};
pub use signals::{StopRequests, stop_signals};
pub use supervise::launch;
pub use verdict::{EndedBy, Outcome, RankEnd};

/// Exit code of a rank that only ended because another one died, hung or disagreed.
pub const EXIT_PEER_FAILED: i32 = 4;

/// What to start, and how often.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// Ranks on this host.
    pub nproc: usize,
    /// Hosts, each with a launcher and as many ranks.
    pub nnodes: usize,
    /// This host's number, from 0.
    pub node_rank: usize,
    /// Rank 0's host; this one if there is only one.
    pub master_addr: Option<String>,
    /// Rank 0's port; a free one if there is only one host.
    pub master_port: Option<u16>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// How this program is called so that it calls [`launch_child`] with the arguments that follow;
    /// `None` for a command that calls [`tie_to_launcher`] itself.
    pub entry: Option<Vec<OsString>>,
    /// Whether the cause of a failure is written to standard error at the end.
    pub reports_cause: bool,
    /// How long ranks may take to end after SIGTERM, once one has failed.
    pub grace: Duration,
    /// How long the launcher waits for a rank to end after SIGKILL. A rank that the kernel holds (its
    /// disk, network file system or GPU does not answer) is left behind then.
    pub give_up: Duration,
    /// Where each rank's output is kept in a file, besides being passed on.
    pub log_dir: Option<PathBuf>,
    /// Ranks that have a GPU together.
    pub ranks_per_gpu: usize,
    /// What tells this job from others, the same on all hosts. Without one, ranks of one host get a
    /// new one, and those of several the one in this process's environment, if any.
    pub job_token: Option<JobToken>,
}

impl LaunchOptions {
    /// `nproc` ranks of `command` on this host, started by `current_exe launch-child ...`.
    pub fn new(nproc: usize, command: Vec<OsString>) -> Self {
        Self {
            nproc,
            nnodes: 1,
            node_rank: 0,
            master_addr: None,
            master_port: None,
            command,
            entry: Some(vec!["launch-child".into()]),
            reports_cause: true,
            grace: Duration::from_secs(3),
            give_up: Duration::from_secs(30),
            log_dir: None,
            ranks_per_gpu: 1,
            job_token: None,
        }
    }

    /// `nproc` ranks on this host of the program that is running, called as it was but for
    /// `arguments`. It must call [`tie_to_launcher`] first of all.
    pub fn this_program(nproc: usize, arguments: impl IntoIterator<Item = OsString>) -> Self {
        // By the name it was called by: what it does may depend on that.
        let program = std::env::args_os().next().unwrap_or_default();
        let command = std::iter::once(program).chain(arguments).collect();
        Self {
            entry: None,
            ..Self::new(nproc, command)
        }
    }

    /// Sets this host's place among several.
    pub fn with_nodes(self, nnodes: usize, node_rank: usize) -> Self {
        Self {
            nnodes,
            node_rank,
            ..self
        }
    }

    /// Sets where rank 0 is found.
    pub fn with_master(self, addr: Option<String>, port: Option<u16>) -> Self {
        Self {
            master_addr: addr,
            master_port: port,
            ..self
        }
    }

    /// Sets the arguments with which this program calls [`launch_child`].
    pub fn with_entry(self, entry: Vec<OsString>) -> Self {
        Self {
            entry: Some(entry),
            ..self
        }
    }

    /// Leaves it to the caller to tell the cause of a failure.
    pub fn without_cause_report(self) -> Self {
        Self {
            reports_cause: false,
            ..self
        }
    }

    /// Sets how long ranks may take to end after SIGTERM, once one has failed.
    pub fn with_grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Also appends what each rank writes to the file `rank-N.log` in this folder, which is made.
    pub fn with_log_dir(self, log_dir: Option<PathBuf>) -> Self {
        Self { log_dir, ..self }
    }

    /// Has so many neighbouring ranks share a GPU: for layouts of more ranks than there are GPUs, to see whether
    /// they are right, not how fast. Each rank is shown its GPU only and told to be a host of its own, or NCCL would
    /// refuse it; it sends over the network then, also within a host.
    pub fn with_ranks_per_gpu(self, ranks_per_gpu: usize) -> Self {
        Self {
            ranks_per_gpu,
            ..self
        }
    }

    /// Sets what tells this job from others, for several hosts.
    pub fn with_job_token(self, job_token: Option<JobToken>) -> Self {
        Self { job_token, ..self }
    }

    /// What all ranks of the job are told.
    fn job(&self) -> Result<Job, LaunchError> {
        let (addr, port, reserved) = self.master()?;
        let token = match (&self.job_token, self.nnodes) {
            (Some(token), _) => Some(token.clone()),
            (None, 1) => Some(JobToken::draw().map_err(LaunchError::NoToken)?),
            (None, _) => None,
        };
        Ok(Job {
            addr,
            port,
            token,
            _reserved: reserved,
        })
    }

    /// The address and port of rank 0; the port is reserved for as long as the third is kept.
    fn master(&self) -> Result<(String, u16, Option<ReservedPort>), LaunchError> {
        let Self {
            nproc,
            nnodes,
            node_rank,
            ranks_per_gpu,
            ..
        } = self;
        let bad = |why: String| Err(LaunchError::BadOptions { why });
        if self.command.is_empty() {
            return bad("no command to start; it stands after `--`".into());
        }
        if *nproc == 0 || nproc.checked_mul(*nnodes).is_none_or(|ranks| ranks == 0) {
            return bad(format!("{nproc} processes on {nnodes} nodes are no run"));
        }
        if *ranks_per_gpu == 0 {
            return bad("0 ranks per GPU are no run".into());
        }
        let visible = std::env::var(RankEnv::VISIBLE_GPUS).ok();
        gpus::check(self, visible.as_deref()).map_err(|why| LaunchError::BadOptions { why })?;
        if node_rank >= nnodes {
            return bad(format!(
                "node rank {node_rank} is not below the {nnodes} nodes"
            ));
        }
        match (&self.master_addr, self.master_port) {
            (Some(addr), Some(port)) => Ok((addr.clone(), port, None)),
            _ if *nnodes > 1 => bad(format!(
                "{nnodes} nodes need `--master-addr` and `--master-port`, the same on each"
            )),
            (addr, port) => {
                let addr = addr.clone().unwrap_or_else(|| "127.0.0.1".into());
                if let Some(port) = port {
                    return Ok((addr, port, None));
                }
                let reserved = ReservedPort::take().map_err(LaunchError::NoPort)?;
                Ok((addr, reserved.number, Some(reserved)))
            }
        }
    }
}

/// Where rank 0 is found, and what tells the job from others.
#[derive(Debug)]
struct Job {
    addr: String,
    port: u16,
    /// `None`: the one in the environment, if any.
    token: Option<JobToken>,
    /// Keeps other launchers off the port until the ranks have met.
    _reserved: Option<ReservedPort>,
}

/// Why the ranks could not be started or watched.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of each variant says what its fields are"
)]
pub enum LaunchError {
    #[error("cannot launch: {why}")]
    BadOptions { why: String },
    #[error("cannot launch: no port of this host is free: {0}")]
    NoPort(io::Error),
    #[error("cannot start the command: {why}")]
    NoCommand { why: String },
    #[error("cannot start the command: `{name}` is no program that may be executed")]
    NotExecutable { name: String },
    #[error("cannot keep logs: {0}")]
    Logs(io::Error),
    #[error("cannot launch: no job token can be drawn: {0}")]
    NoToken(io::Error),
    #[error("cannot start rank {rank}: {error}; every rank that was started has been ended")]
    Start { rank: usize, error: io::Error },
    #[error("cannot watch the ranks: {0}")]
    Watch(io::Error),
}

impl LaunchError {
    /// What the launcher should exit with, as shells do where a command cannot be started.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NoCommand { .. } => child::EXIT_NOT_FOUND,
            Self::NotExecutable { .. } => child::EXIT_CANNOT_START,
            Self::BadOptions { .. } | Self::NoPort(_) | Self::Logs(_) => 2,
            Self::Start { .. } | Self::NoToken(_) | Self::Watch(_) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0, 1, 0, None)]
    #[case(2, 0, 0, None)]
    #[case(2, 2, 2, Some(("host", 5)))]
    #[case(2, 2, 0, None)]
    fn options_that_make_no_run_are_refused(
        #[case] nproc: usize,
        #[case] nnodes: usize,
        #[case] node_rank: usize,
        #[case] master: Option<(&str, u16)>,
    ) {
        let options = LaunchOptions::new(nproc, vec!["true".into()])
            .with_nodes(nnodes, node_rank)
            .with_master(
                master.map(|(addr, _)| addr.into()),
                master.map(|(_, port)| port),
            );
        assert!(matches!(
            options.master(),
            Err(LaunchError::BadOptions { .. })
        ));
    }

    #[test]
    fn no_rank_on_a_gpu_is_refused() {
        let options = LaunchOptions::new(2, vec!["true".into()]).with_ranks_per_gpu(0);
        assert!(matches!(
            options.master(),
            Err(LaunchError::BadOptions { .. })
        ));
    }

    #[test]
    fn each_job_of_one_host_has_a_token_of_its_own_and_several_hosts_share_one() {
        let options = LaunchOptions::new(2, vec!["true".into()]);
        let token = |options: &LaunchOptions| options.job().unwrap().token;
        assert!(token(&options).is_some() && token(&options) != token(&options));
        let several = options
            .with_nodes(2, 1)
            .with_master(Some("host".into()), Some(5));
        assert_eq!(token(&several), None);
        let given = Some(JobToken::secret("s3cret"));
        assert_eq!(token(&several.with_job_token(given.clone())), given);
    }

    #[test]
    fn one_host_needs_neither_address_nor_port() {
        let options = LaunchOptions::new(2, vec!["true".into()]);
        let (addr, first, _reserved) = options.master().unwrap();
        let (_, second, _) = options.master().unwrap();
        assert_eq!(addr, "127.0.0.1");
        assert_ne!(
            first, second,
            "two runs at once must not choose the same port"
        );
    }
}
