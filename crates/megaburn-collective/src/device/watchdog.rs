//! The watchdog of collectives on GPUs: decides what happens to a rank whose GPU is waiting, and names
//! a silent member after the timeout. This module needs no GPU.
//!
//! NCCL kernels wait forever for a peer that is dead, stopped or elsewhere in its program.
//!
//! - When the host transport reports a dead or failing rank, or NCCL reports an error, all
//!   communicators of this process are aborted within 20 ms.
//! - A rank whose oldest call makes no progress asks the other members for theirs. A member that
//!   made a different call is named at once.
//! - When the timeout has passed, a silent or lagging member is named, unless it lags because of a
//!   long phase that makes progress.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use super::{
    heartbeat::{HeartbeatRound, ROUND},
    watched::Watched,
};
use crate::{
    error::CollectiveError, rank_context::fail, recorder::FlightRecorder, transport::Transport,
};

/// After an NCCL error, wait this long for the transport to report which rank died.
const CAUSE: Duration = Duration::from_millis(500);

/// The progress of one group's calls on this rank's GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupStatus {
    /// The group's channel.
    pub(crate) key: u64,
    /// Flight records of calls that ended since the last look.
    pub(crate) finished: Vec<u64>,
    /// The oldest call that has not ended: its flight record, and when it was made.
    pub(crate) oldest: Option<(u64, Instant)>,
    /// The first failure.
    pub(crate) fault: Option<String>,
}

/// The watch of one rank over all its groups.
#[derive(Debug)]
pub(crate) struct Watchdog {
    transport: Arc<dyn Transport>,
    recorder: Arc<FlightRecorder>,
    failure: Arc<OnceLock<CollectiveError>>,
    groups: Groups,
    rounds: HashMap<u64, HeartbeatRound>,
    faulty_since: Option<Instant>,
}

/// The groups of a rank that have made calls on its GPU.
pub(crate) type Groups = Arc<Mutex<Vec<Arc<Watched>>>>;

impl Watchdog {
    pub(crate) fn new(
        transport: Arc<dyn Transport>,
        recorder: Arc<FlightRecorder>,
        failure: Arc<OnceLock<CollectiveError>>,
        groups: Groups,
    ) -> Self {
        let rounds = HashMap::new();
        let faulty_since = None;
        Self {
            transport,
            recorder,
            failure,
            groups,
            rounds,
            faulty_since,
        }
    }

    /// Checks everything at time `now`. Returns the reason if the communicators have to be aborted.
    pub(crate) fn look(&mut self, now: Instant, standings: &[GroupStatus]) -> Option<String> {
        for standing in standings
            .iter()
            .filter(|standing| !standing.finished.is_empty())
        {
            standing
                .finished
                .iter()
                .for_each(|id| self.recorder.finish(*id, None));
            self.rounds.entry(standing.key).or_default().progress = Some(now);
            self.transport.activity().advance();
        }
        if self.failure.get().is_none() {
            let groups = lock(&self.groups).clone();
            let error = groups.iter().find_map(|group| {
                let standing = standings
                    .iter()
                    .find(|standing| standing.key == group.channel);
                self.trouble(now, group, &standing.cloned().unwrap_or_default())
            });
            if let Some((error, oldest)) = error {
                self.fail(&error, oldest);
            }
        }
        self.failure.get().map(ToString::to_string)
    }

    /// Returns a group's failure, if any, and the flight record of the affected call.
    fn trouble(
        &mut self,
        now: Instant,
        group: &Watched,
        standing: &GroupStatus,
    ) -> Option<(CollectiveError, Option<u64>)> {
        let oldest = standing.oldest.map(|(id, _)| id);
        let call = oldest
            .and_then(|id| self.recorder.call(id))
            .or_else(|| group.last_call());
        let Some(call) = call else {
            // This rank has made no call yet, but answers questions all the same.
            self.rounds
                .entry(group.channel)
                .or_default()
                .listen(now, group, &*self.transport);
            return None;
        };
        if let Some(error) = self.transport.gone(group.rank) {
            return Some((group.transport_error(call, error), oldest));
        }
        if let Some(why) = &standing.fault
            && now.duration_since(*self.faulty_since.get_or_insert(now)) >= CAUSE
        {
            return Some((group.device_error(call, why.clone()), oldest));
        }
        let round = self.rounds.entry(group.channel).or_default();
        let waiting = standing.oldest.map(|(_, made)| {
            let since = round.progress.map_or(made, |progress| progress.max(made));
            now.saturating_duration_since(since)
        });
        let waiting = waiting.unwrap_or_default();
        if let Some((peer, found)) = round.listen(now, group, &*self.transport) {
            return Some((group.disagreement(call, peer, found), oldest));
        }
        let suspicious = waiting >= ROUND.min(group.timeout / 4);
        round.tell(now, group, &*self.transport, suspicious);
        if !suspicious {
            return None;
        }
        // A member that finished and left will never make this call.
        let left = group.others().find_map(|peer| self.transport.gone(peer));
        if let Some(error) = left {
            return Some((group.transport_error(call, error), oldest));
        }
        if waiting < group.timeout {
            return None;
        }
        if let Some(busy) = round.at_work(now, group, call.seq) {
            // As on the host: keep waiting for a busy member as long as it makes progress.
            return busy
                .left()
                .is_zero()
                .then(|| (group.stalled(call, &busy), oldest));
        }
        let peer = round.unresponsive_peer(group, call.seq);
        let rank = group.rank;
        let name = group.name.clone();
        let seconds = group.timeout.as_secs_f64();
        tracing::error!("{}", round.dump(group));
        let call = Box::new(call);
        Some((
            CollectiveError::Timeout {
                rank,
                group: name,
                call,
                peer,
                seconds,
            },
            oldest,
        ))
    }

    fn fail(&self, error: &CollectiveError, oldest: Option<u64>) {
        self.transport.activity().freeze();
        if let Some(id) = oldest {
            self.recorder.finish(id, Some(error.to_string()));
        }
        let rank = self.transport.rank();
        if fail(rank, &*self.transport, &self.failure, error) && !error.is_echo() {
            tracing::error!("{error}\n{}", self.recorder.dump_after(rank, error));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
