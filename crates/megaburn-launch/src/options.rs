//! What to launch, and how.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use megaburn_collective::JobToken;

use crate::{error::LaunchError, restart::RestartPolicy};

/// The command to start, how many ranks, and how to supervise them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// The number of ranks on this host.
    pub nproc: usize,
    /// The number of hosts. Each has its own launcher and the same number of ranks.
    pub nnodes: usize,
    /// The number of this host, from 0.
    pub node_rank: usize,
    /// The host of rank 0. With a single host it defaults to this one.
    pub master_addr: Option<String>,
    /// The port of rank 0. With a single host it defaults to a free port.
    pub master_port: Option<u16>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// The arguments with which this program calls [`launch_child`](crate::launch_child); the child's own arguments are
    /// appended. `None` for a command that calls [`tie_to_launcher`](crate::tie_to_launcher) itself.
    pub entry: Option<Vec<OsString>>,
    /// Whether the cause of a failure is written to standard error at the end.
    pub reports_cause: bool,
    /// How long ranks may take to end after SIGTERM, once one has failed.
    pub grace: Duration,
    /// How long the launcher waits for a rank to end after SIGKILL. A rank that hangs in the kernel
    /// (a disk, network file system or GPU does not answer) is then abandoned.
    pub give_up: Duration,
    /// The folder in which each rank's output is also saved to a file.
    pub log_dir: Option<PathBuf>,
    /// The number of ranks that share a GPU.
    pub ranks_per_gpu: usize,
    /// Identifies this job; it must be the same on all hosts. If `None`, a job on a single host
    /// draws a new token, and a job on several hosts uses the one in this process's environment, if
    /// any.
    pub job_token: Option<JobToken>,
    /// How often the ranks are started again after a failure.
    pub restart: RestartPolicy,
    /// Whether ranks that only lost a peer keep their processes in a restart, if their program takes
    /// part ([`RestartInPlace`](crate::RestartInPlace)). Their standard input is then a connection to
    /// the launcher.
    pub restart_in_place: bool,
    /// The least number of hosts that train on after others were lost; `None`: all are needed.
    pub min_nnodes: Option<usize>,
    /// The names of the switches from the outermost one to the host's own, such as `spine1/leaf3`.
    /// Hosts under the same switch get consecutive node ranks, and spares near a lost host take its
    /// place first. `None`: those that Slurm has set in `SLURM_TOPOLOGY_ADDR`, if the launchers
    /// meet anyway. An empty path: none.
    pub topology: Option<String>,
    /// The number of hosts that hold a replica of the model together: a multiple of it trains.
    pub nnodes_per_replica: usize,
    /// Whether a debugger writes the stacks of a rank that hangs before the launcher ends it.
    pub hang_stacks: bool,
    /// The number of hosts beyond [`Self::nnodes`] that wait to replace one that fails. Each has its
    /// own launcher, with a `node_rank` from `nnodes` on.
    pub spares: usize,
    /// The port on which the launchers of several hosts meet; by default the one after
    /// [`Self::master_port`]. It is used only with restarts, spares or a topology.
    pub agent_port: Option<u16>,
    /// How long the launchers of several hosts wait for one that has not come or was lost.
    pub host_timeout: Duration,
}

impl LaunchOptions {
    /// Options for `nproc` ranks of `command` on this host, started by
    /// `current_exe launch-child ...`.
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
            restart: RestartPolicy::NEVER,
            restart_in_place: false,
            min_nnodes: None,
            nnodes_per_replica: 1,
            hang_stacks: false,
            topology: None,
            spares: 0,
            agent_port: None,
            host_timeout: Duration::from_secs(600),
        }
    }

    /// Options for `nproc` ranks of the running program on this host, called under the same name
    /// but with `arguments`. The program must call [`tie_to_launcher`](crate::tie_to_launcher) before anything else.
    pub fn this_program(nproc: usize, arguments: impl IntoIterator<Item = OsString>) -> Self {
        // Use the name it was called by, since its behavior may depend on it.
        let program = std::env::args_os().next().unwrap_or_default();
        let command = std::iter::once(program).chain(arguments).collect();
        Self {
            entry: None,
            ..Self::new(nproc, command)
        }
    }

    /// Sets the number of hosts and the number of this one.
    pub fn with_nodes(self, nnodes: usize, node_rank: usize) -> Self {
        Self {
            nnodes,
            node_rank,
            ..self
        }
    }

    /// Sets the address and port of rank 0.
    pub fn with_master(self, addr: Option<String>, port: Option<u16>) -> Self {
        Self {
            master_addr: addr,
            master_port: port,
            ..self
        }
    }

    /// Sets the arguments with which this program calls [`launch_child`](crate::launch_child).
    pub fn with_entry(self, entry: Vec<OsString>) -> Self {
        Self {
            entry: Some(entry),
            ..self
        }
    }

    /// Leaves it to the caller to report the cause of a failure.
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

    /// Also appends the output of each rank to the file `rank-N.log` in this folder, which is
    /// created.
    pub fn with_log_dir(self, log_dir: Option<PathBuf>) -> Self {
        Self { log_dir, ..self }
    }

    /// Lets this number of neighbouring ranks share a GPU. This allows layouts of more ranks than
    /// there are GPUs, to test correctness rather than speed. Each rank sees only its GPU and gets
    /// a host id of its own, because NCCL would otherwise refuse it; it therefore communicates over
    /// the network, even within a host.
    pub fn with_ranks_per_gpu(self, ranks_per_gpu: usize) -> Self {
        Self {
            ranks_per_gpu,
            ..self
        }
    }

    /// Sets the token that identifies this job, for several hosts.
    pub fn with_job_token(self, job_token: Option<JobToken>) -> Self {
        Self { job_token, ..self }
    }

    /// Sets how often the ranks are started again after a failure.
    pub fn with_restart(self, restart: RestartPolicy) -> Self {
        Self { restart, ..self }
    }

    /// Sets whether ranks that only lost a peer keep their processes in a restart.
    pub fn with_restart_in_place(self, restart_in_place: bool) -> Self {
        Self {
            restart_in_place,
            ..self
        }
    }

    /// Lets the others train on after hosts were lost, as long as this number is left. Hosts that
    /// come back are taken in at the end of a step. Ranks are restarted in place for both, if their
    /// program takes part.
    pub fn with_min_nodes(self, min_nnodes: Option<usize>) -> Self {
        Self { min_nnodes, ..self }
    }

    /// Sets the number of hosts that hold a replica of the model together.
    pub fn with_nodes_per_replica(self, nnodes_per_replica: usize) -> Self {
        Self {
            nnodes_per_replica,
            ..self
        }
    }

    /// Sets where this host is in the network, by which hosts are ordered: the names of the switches
    /// from the outermost one to its own, such as `spine1/leaf3`.
    pub fn with_topology(self, topology: Option<String>) -> Self {
        Self { topology, ..self }
    }

    /// Lets a debugger (`eu-stack` or `gdb`) write the stacks of a rank that hangs into
    /// `rank-N.stacks` in [`Self::log_dir`] or the folder for temporary files.
    pub fn with_hang_stacks(self, hang_stacks: bool) -> Self {
        Self {
            hang_stacks,
            ..self
        }
    }

    /// Sets the number of hosts that wait to replace one that fails.
    pub fn with_spares(self, spares: usize) -> Self {
        Self { spares, ..self }
    }

    /// Sets the port on which the launchers of several hosts meet.
    pub fn with_agent_port(self, agent_port: Option<u16>) -> Self {
        Self { agent_port, ..self }
    }

    /// Sets how long the launchers of several hosts wait for one that has not come or was lost.
    pub fn with_host_timeout(self, host_timeout: Duration) -> Self {
        Self {
            host_timeout,
            ..self
        }
    }

    /// Whether the launchers of several hosts agree on when to start ranks.
    pub(crate) fn has_agents(&self) -> bool {
        let restarts = self.restart != RestartPolicy::NEVER || self.spares > 0;
        self.nnodes > 1 && (restarts || self.has_topology())
    }

    /// Whether the options say where this host is in the network.
    pub(crate) fn has_topology(&self) -> bool {
        let path = self.topology.as_ref();
        path.is_some_and(|path| !path.is_empty())
    }

    /// Whether ranks have a connection to the launcher, by which they are restarted in place.
    pub(crate) fn restarts_in_place(&self) -> bool {
        (self.restart_in_place || self.min_nnodes.is_some()) && self.restart != RestartPolicy::NEVER
    }

    /// The numbers of ranks with which the job may train, largest first.
    pub(crate) fn world_sizes(&self) -> Vec<usize> {
        let least = self.min_nnodes.unwrap_or(self.nnodes).max(1);
        let hosts = (least..=self.nnodes).rev();
        hosts
            .filter(|hosts| hosts.is_multiple_of(self.nnodes_per_replica))
            .map(|hosts| hosts * self.nproc)
            .collect()
    }

    /// The port on which the launchers meet.
    ///
    /// # Errors
    /// There is no port after that of rank 0.
    pub(crate) fn agents_port(&self, master_port: u16) -> Result<u16, LaunchError> {
        let port = self.agent_port.or_else(|| master_port.checked_add(1));
        port.filter(|port| *port != master_port)
            .ok_or_else(|| LaunchError::BadOptions {
                why: "the launchers of several hosts need a port of their own: set `--agent-port` \
                    to one that differs from `--master-port`"
                    .into(),
            })
    }
}
