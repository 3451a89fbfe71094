//! What all ranks of a job get: the address of rank 0, the token, the launch.

use megaburn_collective::{JobToken, RankEnv};

use crate::{
    error::LaunchError, gpus, in_place::Restart, launched::Launch, options::LaunchOptions,
    port::ReservedPort, restart::RestartPolicy, topology::Topology,
};

/// The address of rank 0 and the token of the job.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) addr: String,
    pub(crate) port: u16,
    /// `None`: use the token in the environment, if any.
    pub(crate) token: Option<JobToken>,
    /// What all attempts have in common, if the launchers of all hosts know it.
    pub(crate) launch: Option<Launch>,
    /// Why the attempt before this one ended.
    pub(crate) cause: Option<String>,
    /// The numbers of ranks with which attempts may train.
    pub(crate) world_sizes: Vec<usize>,
    /// Prevents other launchers from choosing the port until the ranks have met.
    _reserved: Option<ReservedPort>,
}

impl Job {
    /// The job that the options describe.
    ///
    /// # Errors
    /// The options are invalid, or there is no free port or random number.
    pub(crate) fn of(options: &LaunchOptions) -> Result<Self, LaunchError> {
        let (addr, port, reserved) = master(options)?;
        let token = match (&options.job_token, options.nnodes) {
            (Some(token), _) => Some(token.clone()),
            (None, 1) => Some(JobToken::draw().map_err(LaunchError::NoToken)?),
            (None, _) => None,
        };
        // Launchers of several hosts that do not meet have no launch in common.
        let launch = (options.nnodes == 1 || options.has_agents()).then(Launch::begin);
        Ok(Self {
            addr,
            port,
            token,
            launch: launch.transpose().map_err(LaunchError::NoToken)?,
            cause: None,
            world_sizes: options.world_sizes(),
            _reserved: reserved,
        })
    }

    /// Returns the token that all hosts share: the one in the options, or the environment's.
    pub(crate) fn token_of_hosts(&self) -> JobToken {
        self.token.clone().unwrap_or_else(JobToken::from_env)
    }

    /// This job for another attempt of `launch`, with a token that only this attempt has. `cause` says
    /// why the attempt before it ended.
    pub(crate) fn of_attempt(
        self,
        attempt: usize,
        launch: Option<Launch>,
        cause: Option<String>,
    ) -> Self {
        let token = self.token.map(|token| token.of_attempt(attempt));
        Self {
            token,
            launch,
            cause,
            ..self
        }
    }

    /// The job of several hosts, as their coordinator describes it.
    pub(crate) fn new(
        options: &LaunchOptions,
        addr: String,
        port: u16,
        token: JobToken,
        launch: Launch,
    ) -> Self {
        Self {
            addr,
            port,
            token: Some(token),
            launch: Some(launch),
            cause: None,
            world_sizes: options.world_sizes(),
            _reserved: None,
        }
    }

    /// What rank `rank` of `world_size`, which restarts in place, has to know of attempt `attempt`.
    pub(crate) fn restart(&self, attempt: usize, rank: usize, world_size: usize) -> Restart {
        Restart {
            attempt,
            rank,
            world_size,
            master_addr: self.addr.clone(),
            master_port: self.port,
            token: self.token.as_ref().map(|token| token.text().into()),
            cause: self.cause.clone(),
        }
    }

    /// This job, whose attempt before ended because of `cause`.
    pub(crate) fn with_cause(self, cause: Option<String>) -> Self {
        Self { cause, ..self }
    }
}

/// The address and port of rank 0. The port is reserved until the third value is dropped.
fn master(options: &LaunchOptions) -> Result<(String, u16, Option<ReservedPort>), LaunchError> {
    let LaunchOptions {
        nproc,
        nnodes,
        node_rank,
        ranks_per_gpu,
        ..
    } = options;
    let bad = |why: String| Err(LaunchError::BadOptions { why });
    if options.command.is_empty() {
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
    gpus::check(options, visible.as_deref()).map_err(|why| LaunchError::BadOptions { why })?;
    if let Some(least) = options.min_nnodes
        && !(1..=*nnodes).contains(&least)
    {
        return bad(format!(
            "`--min-nnodes` is {least}: it must be at least 1 and at most `--nnodes`, {nnodes}"
        ));
    }
    if options.min_nnodes.is_some() && (*nnodes == 1 || options.restart == RestartPolicy::NEVER) {
        return bad(
            "`--min-nnodes` restarts a job of several hosts: set `--nnodes`, and `--restarts` to \
            at least 1"
                .into(),
        );
    }
    let of_replica = options.nnodes_per_replica;
    let hosts = [*nnodes, options.min_nnodes.unwrap_or(*nnodes)];
    if of_replica == 0 || hosts.iter().any(|hosts| !hosts.is_multiple_of(of_replica)) {
        return bad(format!(
            "`--nnodes-per-replica` is {of_replica}: `--nnodes` and `--min-nnodes` must be \
            multiples of it"
        ));
    }
    Topology::of(options)?;
    if options.has_topology() && *nnodes == 1 {
        return bad("`--topology` orders several hosts: set `--nnodes`, or leave it out".into());
    }
    if options.spares > 0 && *nnodes == 1 {
        return bad("spare hosts need a job of several hosts: set `--nnodes`".into());
    }
    if *node_rank >= nnodes + options.spares {
        let with_spares = match options.spares {
            0 => String::new(),
            spares => format!(" plus {spares} spares"),
        };
        return bad(format!(
            "node rank {node_rank} must be less than the number of nodes, {nnodes}{with_spares}"
        ));
    }
    match (&options.master_addr, options.master_port) {
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
        #[case] address: Option<(&str, u16)>,
    ) {
        let options = LaunchOptions::new(nproc, vec!["true".into()])
            .with_nodes(nnodes, node_rank)
            .with_master(
                address.map(|(addr, _)| addr.into()),
                address.map(|(_, port)| port),
            );
        assert!(matches!(
            master(&options),
            Err(LaunchError::BadOptions { .. })
        ));
    }

    #[rstest]
    #[case(1, "leaf3", "set `--nnodes`")]
    #[case(2, "/leaf3", "\"/leaf3\"")]
    fn a_topology_that_orders_nothing_is_refused(
        #[case] nnodes: usize,
        #[case] path: &str,
        #[case] said: &str,
    ) {
        let options = LaunchOptions::new(2, vec!["true".into()])
            .with_nodes(nnodes, 0)
            .with_master(Some("host".into()), Some(5))
            .with_topology(Some(path.into()));
        let why = master(&options).unwrap_err().to_string();
        assert!(why.contains(said), "{why}");
    }

    #[test]
    fn launchers_meet_for_a_topology_but_not_without_one() {
        let options = LaunchOptions::new(2, vec!["true".into()]).with_nodes(2, 0);
        let meet = |path: Option<&str>| {
            let options = options.clone().with_topology(path.map(Into::into));
            options.has_agents()
        };
        assert_eq!(
            (meet(Some("leaf3")), meet(Some("")), meet(None)),
            (true, false, false)
        );
    }

    #[rstest]
    #[case(4, 0, 2, 1)]
    #[case(1, 3, 1, 1)]
    #[case(4, 3, 0, 1)]
    #[case(4, 3, 5, 1)]
    #[case(4, 3, 2, 0)]
    #[case(4, 3, 1, 2)]
    #[case(3, 3, 2, 2)]
    fn numbers_of_hosts_that_cannot_train_are_refused(
        #[case] nnodes: usize,
        #[case] restarts: usize,
        #[case] min_nnodes: usize,
        #[case] of_replica: usize,
    ) {
        let options = LaunchOptions::new(2, vec!["true".into()])
            .with_nodes(nnodes, 0)
            .with_master(Some("host".into()), Some(5))
            .with_restart(RestartPolicy::new(restarts))
            .with_min_nodes(Some(min_nnodes))
            .with_nodes_per_replica(of_replica);
        assert!(matches!(
            master(&options),
            Err(LaunchError::BadOptions { .. })
        ));
    }

    #[test]
    fn a_multiple_of_the_hosts_of_a_replica_trains() {
        let options = LaunchOptions::new(8, vec!["true".into()])
            .with_nodes(6, 0)
            .with_min_nodes(Some(2))
            .with_nodes_per_replica(2);
        assert_eq!(options.world_sizes(), [48, 32, 16]);
    }

    #[test]
    fn no_rank_on_a_gpu_is_refused() {
        let options = LaunchOptions::new(2, vec!["true".into()]).with_ranks_per_gpu(0);
        assert!(matches!(
            master(&options),
            Err(LaunchError::BadOptions { .. })
        ));
    }

    #[test]
    fn each_job_of_one_host_has_a_token_of_its_own_and_several_hosts_share_one() {
        let options = LaunchOptions::new(2, vec!["true".into()]);
        let token = |options: &LaunchOptions| Job::of(options).unwrap().token;
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
        let (addr, first, _reserved) = master(&options).unwrap();
        let (_, second, _) = master(&options).unwrap();
        assert_eq!(addr, "127.0.0.1");
        assert_ne!(
            first, second,
            "two runs at once must not choose the same port"
        );
    }
}
