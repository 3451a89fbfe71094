//! Ranks as processes on one or several hosts, over TCP.
//!
//! All ranks meet at rank 0 (`MASTER_ADDR:MASTER_PORT`), which gives each its place in a tree
//! ([`crate::tree`]). Each connects to the ranks next to it, at most three, and hears from them where
//! all others listen; afterwards rank 0 is a rank like any other. Failures and the ends of ranks
//! travel along the tree. Two ranks that exchange messages open a connection of their own at the
//! first one.
//!
//! A caller without the job's token ([`JobToken`]) is refused at every port. The connections are not
//! encrypted: run only in a network that all hosts trust.

mod acceptor;
mod admission;
mod build;
mod coordinator;
mod ended;
mod endpoint;
mod env;
mod flood;
mod flood_progress;
mod hosts;
mod introductions;
mod line;
mod reader;
mod refusals;
mod socket;
mod stack;
mod token;
mod transport;
mod wire;
mod worker;

use std::{sync::Arc, time::Duration};

pub use env::RankEnv;
pub use socket::free_port;
pub use token::JobToken;

use crate::{
    error::CollectiveError, group::Group, options::GroupOptions, rank_context::RankContext,
};

/// Options for joining a run.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Which rank this is, and the address of rank 0.
    pub env: RankEnv,
    /// The run's seed, the same on all ranks, and the timeout of collectives.
    pub group: GroupOptions,
    /// How long hosts may take to arrive. The ranks of one host are started together: once one has
    /// joined, the others must join within the timeout of collectives, if the number of ranks on
    /// the host is known.
    pub rendezvous_timeout: Duration,
}

impl ConnectOptions {
    /// Default group options, and ten minutes for the rendezvous.
    pub fn new(env: RankEnv) -> Self {
        let rendezvous_timeout = Duration::from_secs(600);
        Self {
            env,
            group: GroupOptions::default(),
            rendezvous_timeout,
        }
    }

    /// Sets the seed and the timeout of collectives.
    pub fn with_group(self, group: GroupOptions) -> Self {
        Self { group, ..self }
    }

    /// Sets how long hosts may take to arrive.
    pub fn with_rendezvous_timeout(self, rendezvous_timeout: Duration) -> Self {
        Self {
            rendezvous_timeout,
            ..self
        }
    }

    /// How long the ranks may take to connect to each other, once all have arrived.
    fn meshing(&self) -> Duration {
        const LEAST: Duration = Duration::from_secs(2);
        self.group
            .timeout
            .max(LEAST)
            .min(self.rendezvous_timeout.max(LEAST))
    }
}

/// Joins a run over TCP. Returns this rank's world group when every rank is connected to those next
/// to it in a tree of all ranks. When the last handle on the group is dropped, the rank leaves in order; a process that
/// ends without dropping it is a dead peer to the others.
///
/// ```no_run
/// use megaburn_collective::{ConnectOptions, Group, RankEnv, connect};
///
/// # fn main() -> Result<(), megaburn_collective::CollectiveError> {
/// let world = match RankEnv::from_env()? {
///     Some(env) => connect(&ConnectOptions::new(env))?,
///     None => Group::single(0),
/// };
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// - Rank 0's port is in use.
/// - Ranks do not arrive in time; the error names them.
/// - Two processes have the same `RANK`, or ranks differ in build, `WORLD_SIZE` or seed.
/// - A rank reported that it cannot start ([`report_start_failure`]). Ranks that connect within the
///   next half minute receive this error too.
///
/// A mistake of one rank ends all ranks at once if the job has a secret token
/// ([`JobToken::secret`]). Without one, such a caller may belong to another job: it is refused, the
/// right rank has the timeout of collectives to arrive, and then the job ends with the reason.
/// Connections from elsewhere change nothing; the message lists them if ranks are missing in the
/// end.
/// # Collective
/// All ranks.
pub fn connect(options: &ConnectOptions) -> Result<Group, CollectiveError> {
    let ConnectOptions { env, group, .. } = options;
    if env.rank >= env.world_size {
        let why = format!(
            "rank {} does not exist in a world of {}",
            env.rank, env.world_size
        );
        return Err(CollectiveError::Rendezvous { why });
    }
    if env.world_size == 1 {
        return Ok(Group::alone(*group));
    }
    let transport = match env.rank {
        0 => coordinator::gather(&socket::listen(&env.master_addr, env.master_port)?, options)?,
        _ => worker::join(options)?,
    };
    Ok(Group::world(
        Arc::new(RankContext::new(Arc::new(transport))),
        *group,
    ))
}

/// Takes part in the rendezvous only to report that this rank cannot start, so that the others do
/// not wait for it: the reason `why` and the exit code of its process. Their [`connect`] fails with
/// [`CollectiveError::CannotStart`].
///
/// Returns when the others have received the report, or did not arrive in time.
pub fn report_start_failure(options: &ConnectOptions, why: &str, code: i32) {
    let env = &options.env;
    if env.world_size <= 1 || env.rank >= env.world_size {
        return;
    }
    let failure = wire::StartFailure {
        rank: env.rank,
        why: why.to_string(),
        code,
    };
    if env.rank > 0 {
        worker::tell_failure(options, failure);
    } else if let Ok(listener) = socket::listen(&env.master_addr, env.master_port) {
        coordinator::tell_failure(&listener, options, failure);
    }
}
