//! `megaburn launch`: a program as several ranks on this host.

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Args, builder::NonEmptyStringValueParser};
use megaburn_collective::JobToken;
use megaburn_launch::{LaunchOptions, launch};

use super::{exit_code, print};

#[derive(Args)]
/// A program and how many ranks of it.
pub(super) struct LaunchArgs {
    /// Ranks on this host.
    #[arg(long, value_name = "N")]
    nproc: usize,
    /// Hosts, each with a launcher of its own.
    #[arg(long, value_name = "M", default_value_t = 1)]
    nnodes: usize,
    /// This host's number, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Rank 0's host, needed with several hosts.
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Rank 0's port, needed with several hosts.
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,
    /// What tells this job from others, the same on each host: ranks that say another are refused.
    /// Others on this host can read it in the list of processes; MEGABURN_JOB_TOKEN in the environment does
    /// the same unseen. Default: drawn anew on one host.
    #[arg(long, value_name = "TOKEN", value_parser = NonEmptyStringValueParser::new())]
    job_token: Option<String>,
    /// Ranks that have a GPU together: to try layouts of more ranks than there are GPUs, slowly.
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks_per_gpu: usize,
    /// Also append what each rank writes to the file rank-N.log in this folder.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// The program and its arguments, behind `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    pub(super) fn run(self) -> ExitCode {
        let options = LaunchOptions::new(self.nproc, self.command)
            .with_nodes(self.nnodes, self.node_rank)
            .with_master(self.master_addr, self.master_port)
            .with_ranks_per_gpu(self.ranks_per_gpu)
            .with_job_token(self.job_token.map(JobToken::secret))
            .with_log_dir(self.log_dir);
        match launch(&options) {
            Ok(outcome) => exit_code(outcome.exit_code()),
            Err(error) => {
                print::error(&error);
                exit_code(error.exit_code())
            }
        }
    }
}
