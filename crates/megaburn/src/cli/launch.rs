//! `megaburn launch`: runs a program as several ranks on this host.

use std::{ffi::OsString, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, builder::NonEmptyStringValueParser};
use megaburn_collective::JobToken;
use megaburn_launch::{LaunchOptions, RestartPolicy, launch};

use super::{exit_code, print};

#[derive(Args)]
/// The program to run and its number of ranks.
pub(super) struct LaunchArgs {
    /// Number of ranks on this host.
    #[arg(long, value_name = "N")]
    nproc: usize,
    /// Number of hosts; each runs its own launcher.
    #[arg(long, value_name = "M", default_value_t = 1)]
    nnodes: usize,
    /// Number of this host, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Host of rank 0; required with several hosts.
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Port of rank 0; required with several hosts.
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,
    /// Identifies this job and must be the same on every host: ranks with another token are
    /// refused. Other users of this host can read it in the list of processes; MEGABURN_JOB_TOKEN
    /// in the environment has the same effect and stays private. Default: a new token, with one
    /// host.
    #[arg(long, value_name = "TOKEN", value_parser = NonEmptyStringValueParser::new())]
    job_token: Option<String>,
    /// Number of ranks that share a GPU. This allows layouts of more ranks than there are GPUs, but
    /// is slow.
    #[arg(long, value_name = "N", default_value_t = 1)]
    ranks_per_gpu: usize,
    /// Also append the output of each rank to the file rank-N.log in this folder.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// How often the ranks are started again after one fails, hangs or is killed, or a host is
    /// lost. A run continues from its last checkpoint.
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: usize,
    /// Count only the restarts within this many seconds, so that rare failures never end the job.
    #[arg(long, value_name = "SECONDS", requires = "restarts",
        value_parser = clap::value_parser!(u64).range(1..))]
    restart_window: Option<u64>,
    /// Restart ranks that only lost a peer in their own processes, which keep their CUDA context, compiled
    /// kernels and data. The others are started anew.
    #[arg(long, requires = "restarts")]
    restart_in_place: bool,
    /// Train on with at least this number of hosts after others were lost, and take hosts in that come
    /// back. Leave the data-parallel size of the layout open. Implies --restart-in-place.
    #[arg(long, value_name = "M", requires = "restarts")]
    min_nnodes: Option<usize>,
    /// Where this host is in the network: the names of the switches from the outermost one to its own,
    /// such as spine1/leaf3. Hosts under the same switch get consecutive node ranks; node 0 stays the
    /// first. Give it to all launchers. Default: what Slurm says, with --restarts or --spares; an
    /// empty path switches that off.
    #[arg(long, value_name = "PATH")]
    topology: Option<String>,
    /// With --min-nnodes: the number of hosts that hold a replica of the model together, such as 2 for
    /// tp8-pp2 on hosts of 8 GPUs. A multiple of it trains.
    #[arg(long, value_name = "K", default_value_t = 1, requires = "min_nnodes")]
    nnodes_per_replica: usize,
    /// Before a rank that hangs is ended, let a debugger (eu-stack or gdb, if it is installed) write what
    /// its threads call, into rank-N.stacks in --log-dir or the folder for temporary files.
    #[arg(long)]
    hang_stacks: bool,
    /// Number of hosts beyond --nnodes that wait to replace one that is lost or fails repeatedly;
    /// their launchers have the node ranks from --nnodes on.
    #[arg(long, value_name = "S", default_value_t = 0)]
    spares: usize,
    /// Port on which the launchers of several hosts meet, with --restarts, --spares or --topology.
    /// Default: the one after --master-port.
    #[arg(long, value_name = "P")]
    agent_port: Option<u16>,
    /// How long the launchers of several hosts wait for one that has not come or was lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    host_timeout: u64,
    /// The program and its arguments, after `--`.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    pub(super) fn run(self) -> ExitCode {
        let window = self.restart_window.map(Duration::from_secs);
        let options = LaunchOptions::new(self.nproc, self.command)
            .with_nodes(self.nnodes, self.node_rank)
            .with_master(self.master_addr, self.master_port)
            .with_ranks_per_gpu(self.ranks_per_gpu)
            .with_job_token(self.job_token.map(JobToken::secret))
            .with_log_dir(self.log_dir)
            .with_restart(RestartPolicy::new(self.restarts).with_window(window))
            .with_restart_in_place(self.restart_in_place)
            .with_min_nodes(self.min_nnodes)
            .with_nodes_per_replica(self.nnodes_per_replica)
            .with_hang_stacks(self.hang_stacks)
            .with_topology(self.topology)
            .with_spares(self.spares)
            .with_agent_port(self.agent_port)
            .with_host_timeout(Duration::from_secs(self.host_timeout));
        match launch(&options) {
            Ok(outcome) => exit_code(outcome.exit_code()),
            Err(error) => {
                print::error(&error);
                exit_code(error.exit_code())
            }
        }
    }
}
