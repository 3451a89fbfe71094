use thiserror::Error;

use crate::call::Call;

/// Why a collective failed. Every error names the rank, its group, the operation and its sequence
/// number.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum CollectiveError {
    #[error(
        "rank {rank}, group {group}: ranks disagree: this rank called {mine}, rank {peer} called {theirs}"
    )]
    Mismatch {
        rank: usize,
        group: String,
        mine: Box<Call>,
        peer: usize,
        theirs: Box<Call>,
    },
    #[error(
        "rank {rank}, group {group}: {call}: ranks disagree: among the first {num_calls} calls of \
        the group, rank {peer} made different calls from this rank"
    )]
    Diverged {
        rank: usize,
        group: String,
        call: Box<Call>,
        peer: usize,
        num_calls: u64,
    },
    #[error(
        "rank {rank}, group {group}: {call} timed out after {seconds:.1} s waiting for rank \
        {peer}; it is stopped, stuck, or slower than `timeout`"
    )]
    Timeout {
        rank: usize,
        group: String,
        call: Box<Call>,
        peer: usize,
        seconds: f64,
    },
    #[error(
        "rank {rank}, group {group}: {call} was abandoned: {what}, which exceeds the limit \
        (`{limit_key}`)"
    )]
    Stalled {
        rank: usize,
        group: String,
        call: Box<Call>,
        peer: usize,
        limit_key: &'static str,
        what: String,
    },
    #[error("rank {rank}, group {group}: {call} lost rank {peer}: {why}")]
    PeerLost {
        rank: usize,
        group: String,
        call: Box<Call>,
        peer: usize,
        why: String,
    },
    #[error(
        "rank {rank}, group {group}: {call} was ended by rank {by}, which failed first: {reason}"
    )]
    Aborted {
        rank: usize,
        group: String,
        call: Box<Call>,
        by: usize,
        reason: String,
        is_hang: bool,
    },
    #[error("rank {rank}, group {group}: {call} failed on the GPU: {why}")]
    Device {
        rank: usize,
        group: String,
        call: Box<Call>,
        why: String,
    },
    #[error("rank {rank}, group {group}: {call}: {why}")]
    BadArgument {
        rank: usize,
        group: String,
        call: Box<Call>,
        why: String,
    },
    #[error("rank {rank}, group {group}: unusable since an earlier failure: {first}")]
    Unusable {
        rank: usize,
        group: String,
        first: Box<CollectiveError>,
    },
    #[error("rank {rank} of {world_size} cannot create group {group} of ranks {members:?}: {why}")]
    BadGroup {
        rank: usize,
        group: String,
        members: Vec<usize>,
        world_size: usize,
        why: String,
    },
    #[error("environment variable {variable} {why}")]
    BadEnvironment { variable: String, why: String },
    #[error(
        "rank 0 cannot listen at {address}: the port is in use, perhaps by another run; choose \
        another port (`MASTER_PORT`, `--master-port`)"
    )]
    AddressInUse { address: String },
    #[error("rank {rank} cannot start: {why}")]
    CannotStart { rank: usize, why: String, code: i32 },
    #[error("rendezvous: {why}")]
    Rendezvous { why: String },
}

impl CollectiveError {
    /// Whether this rank only received a failure that another rank detected first.
    pub fn is_echo(&self) -> bool {
        matches!(self, Self::Aborted { .. } | Self::Unusable { .. })
    }
}
