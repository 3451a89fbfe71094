//! What to launch, and how.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use megaburn_collective::{JobToken, RankEnv};

use crate::{
    LaunchError, gpus, launched::Launch, port::ReservedPort, restart::RestartPolicy,
};

/// The command to start, how many ranks, and how to supervise them.
#[derive(Clone, Debug)]
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
    /// The arguments with which this program calls [`launch_child`]; the child's own arguments are
    /// appended. `None` for a command that calls [`tie_to_launcher`] itself.
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
    /// The number of hosts beyond [`Self::nnodes`] that wait to replace one that fails. Each has its
    /// own launcher, with a `node_rank` from `nnodes` on.
    pub spares: usize,
    /// The port on which the launchers of several hosts meet; by default the one after
    /// [`Self::master_port`]. It is used only with restarts or spares.
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
            spares: 0,
            agent_port: None,
            host_timeout: Duration::from_secs(600),
        }
    }

    /// Options for `nproc` ranks of the running program on this host, called under the same name
    /// but with `arguments`. The program must call [`tie_to_launcher`] before anything else.
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

    /// Sets the arguments with which this program calls [`launch_child`].
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
        self.nnodes > 1 && (self.restart != RestartPolicy::NEVER || self.spares > 0)
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

    /// The rendezvous data that all ranks of the job get.
    pub(crate) fn job(&self) -> Result<Job, LaunchError> {
        let (addr, port, reserved) = self.master()?;
        let token = match (&self.job_token, self.nnodes) {
            (Some(token), _) => Some(token.clone()),
            (None, 1) => Some(JobToken::draw().map_err(LaunchError::NoToken)?),
            (None, _) => None,
        };
        // Launchers of several hosts that do not meet have no launch in common.
        let launch = (self.nnodes == 1 || self.has_agents()).then(Launch::begin);
        Ok(Job {
            addr,
            port,
            token,
            launch: launch.transpose().map_err(LaunchError::NoToken)?,
            _reserved: reserved,
        })
    }

    /// The address and port of rank 0. The port is reserved until the third value is dropped.
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
            return bad("no command to start; give it after `--`".into());
        }
        if *nproc == 0 || nproc.checked_mul(*nnodes).is_none_or(|ranks| ranks == 0) {
            return bad(format!(
                "{nproc} processes on {nnodes} nodes: both numbers must be at \
                               least 1"
            ));
        }
        if *ranks_per_gpu == 0 {
            return bad("ranks per GPU must be at least 1".into());
        }
        let visible = std::env::var(RankEnv::VISIBLE_GPUS).ok();
        gpus::check(self, visible.as_deref()).map_err(|why| LaunchError::BadOptions { why })?;
        if self.spares > 0 && *nnodes == 1 {
            return bad("spare hosts need a job of several hosts: set `--nnodes`".into());
        }
        if *node_rank >= nnodes + self.spares {
            let with_spares = match self.spares {
                0 => String::new(),
                spares => format!(" plus {spares} spares"),
            };
            return bad(format!(
                "node rank {node_rank} must be less than the number of nodes, {nnodes}{with_spares}"
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

/// The address of rank 0 and the token of the job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) addr: String,
    pub(crate) port: u16,
    /// `None`: use the token in the environment, if any.
    pub(crate) token: Option<JobToken>,
    /// What all attempts have in common, if the launchers of all hosts know it.
    pub(crate) launch: Option<Launch>,
    /// Prevents other launchers from choosing the port until the ranks have met.
    _reserved: Option<ReservedPort>,
}

impl Job {
    /// The token that all hosts have: the given one, or that of the environment.
    pub(crate) fn token_of_hosts(&self) -> JobToken {
        self.token.clone().unwrap_or_else(JobToken::from_env)
    }

    /// This job for another attempt of `launch`, with a token that only this attempt has.
    pub(crate) fn of_attempt(self, attempt: usize, launch: Option<Launch>) -> Self {
        let token = self.token.map(|token| token.of_attempt(attempt));
        Self {
            token,
            launch,
            ..self
        }
    }

    /// The job of several hosts, as their coordinator describes it.
    pub(crate) fn new(addr: String, port: u16, token: JobToken, launch: Launch) -> Self {
        Self {
            addr,
            port,
            token: Some(token),
            launch: Some(launch),
            _reserved: None,
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
