use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::call_log::{CallLog, Disagreement};
use crate::{
    busy::Busy,
    call::Call,
    error::CollectiveError,
    exchange::{stalled, transport_error},
    fault::{Channel, TransportError},
};

/// A group whose calls are watched.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) name: String,
    /// This rank's number in the world.
    pub(crate) rank: usize,
    /// The members' ranks in the world.
    pub(crate) members: Vec<usize>,
    /// The channel on which digests are sent.
    pub(crate) channel: Channel,
    pub(crate) timeout: Duration,
    log: Mutex<CallLog>,
}

impl Watched {
    pub(crate) fn new(
        name: &str,
        rank: usize,
        members: Vec<usize>,
        channel: Channel,
        timeout: Duration,
    ) -> Self {
        Self {
            name: name.to_string(),
            rank,
            members,
            channel,
            timeout,
            log: Mutex::default(),
        }
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, CallLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn last_call(&self) -> Option<Call> {
        self.log().last().cloned()
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> {
        self.members
            .iter()
            .copied()
            .filter(|member| *member != self.rank)
    }

    pub(super) fn transport_error(&self, call: Call, error: TransportError) -> CollectiveError {
        let timeout = |rank, group, call| CollectiveError::Device {
            rank,
            group,
            call,
            why: "the host transport timed out".into(),
        };
        transport_error(self.rank, self.name.clone(), call, error, timeout)
    }

    pub(super) fn stalled(&self, call: Call, busy: &Busy) -> CollectiveError {
        stalled(self.rank, self.name.clone(), Box::new(call), busy)
    }

    pub(super) fn device_error(&self, call: Call, why: String) -> CollectiveError {
        let rank = self.rank;
        let group = self.name.clone();
        let call = Box::new(call);
        CollectiveError::Device {
            rank,
            group,
            call,
            why,
        }
    }

    pub(super) fn disagreement(
        &self,
        call: Call,
        peer: usize,
        found: Disagreement,
    ) -> CollectiveError {
        let rank = self.rank;
        let group = self.name.clone();
        match found {
            Disagreement::At(calls) => {
                let [mine, theirs] = calls.map(Box::new);
                CollectiveError::Mismatch {
                    rank,
                    group,
                    mine,
                    peer,
                    theirs,
                }
            }
            Disagreement::Before(num_calls) => CollectiveError::Diverged {
                rank,
                group,
                call: Box::new(call),
                peer,
                num_calls,
            },
        }
    }
}
