//! Ranks as processes on one host or many, over TCP.
//!
//! All ranks meet at rank 0 (`MASTER_ADDR:MASTER_PORT`), learn where the others are, and connect to
//! each of them; afterwards rank 0 is a rank like any other. The connections carry neither
//! encryption nor passwords: a run belongs into a network that its hosts trust.

mod env;
mod guest;
mod host;
mod socket;
mod transport;
mod wire;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub use env::RankEnv;
pub use socket::free_port;

use crate::{CollectiveError, Group, GroupOptions, exchange::Link};

/// How a process joins its run.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Which rank this is, and where rank 0 is found.
    pub env: RankEnv,
    /// The run's seed, the same on all ranks, and the timeout of collectives.
    pub group: GroupOptions,
    /// How long all ranks together may take to come.
    pub rendezvous_timeout: Duration,
}

impl ConnectOptions {
    /// Default group options, and five minutes for the rendezvous.
    pub fn new(env: RankEnv) -> Self {
        let rendezvous_timeout = Duration::from_secs(300);
        Self { env, group: GroupOptions::default(), rendezvous_timeout }
    }

    /// Sets the seed and the timeout of collectives.
    pub fn with_group(self, group: GroupOptions) -> Self {
        Self { group, ..self }
    }

    /// Sets how long all ranks together may take to come.
    pub fn with_rendezvous_timeout(self, rendezvous_timeout: Duration) -> Self {
        Self { rendezvous_timeout, ..self }
    }
}

/// Joins a run over TCP: returns this rank's world group when every rank is connected to every
/// other. When the last handle on the group is dropped the rank leaves in order; a process that
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
/// Rank 0's port is in use; ranks do not come in time (they are named); two processes have one
/// `RANK`, or ranks differ in `WORLD_SIZE` or seed. A mistake of one rank ends all that came.
/// Connections from elsewhere are refused and change nothing.
/// # Collective
/// All ranks.
pub fn connect(options: &ConnectOptions) -> Result<Group, CollectiveError> {
    let ConnectOptions { env, group, rendezvous_timeout } = options;
    if env.rank >= env.world_size {
        let why = format!("rank {} does not exist among {}", env.rank, env.world_size);
        return Err(CollectiveError::Rendezvous { why });
    }
    if env.world_size == 1 {
        return Ok(Group::alone(*group));
    }
    let deadline = Instant::now() + *rendezvous_timeout;
    let streams = match env.rank {
        0 => {
            let listener = socket::listen(&env.master_addr, env.master_port)?;
            host::gather(&listener, env, group.seed, deadline)?
        }
        _ => guest::join(env, group.seed, deadline)?,
    };
    let transport = transport::TcpTransport::new(env.rank, streams)
        .map_err(|error| socket::rendezvous(format!("cannot start reading: {error}")))?;
    Ok(Group::world(Arc::new(Link::new(Arc::new(transport))), *group))
}
