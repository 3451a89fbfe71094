//! Queues of the messages that have arrived for a rank, and notice of failures after which none
//! will arrive.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    marker::PhantomData,
    time::{Duration, Instant},
};

use crate::{
    busy::Busy,
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    sync::{Monitor, StdMonitor},
};

/// What a rank learned from its peers after its wait timed out.
#[derive(Debug)]
pub(crate) struct TimeoutReport<M> {
    /// The message that it waited for, if it has arrived after all.
    pub(crate) message: Option<M>,
    /// Ranks that ask why they have to wait for this rank.
    pub(crate) asked_by: Vec<usize>,
    /// Whether the peer answered that it is waiting as well.
    pub(crate) also_waiting: bool,
    /// Set if the peer, or a rank that the peer waits for, is in a long phase.
    pub(crate) busy: Option<Busy>,
    /// The failure that ends all waits.
    pub(crate) failure: Option<TransportError>,
}

/// Messages that have arrived for one rank and were not taken yet.
///
/// A panic while its monitor `L` is locked does no harm: every change is a single step, so the
/// queues stay consistent.
#[derive(Debug)]
pub(crate) struct Mailbox<M, L = StdMonitor<MailboxState<M>>> {
    state: L,
    messages: PhantomData<M>,
}

/// The contents of a [`Mailbox`].
#[derive(Debug)]
pub(crate) struct MailboxState<M> {
    queues: HashMap<(Channel, usize), VecDeque<M>>,
    left: HashMap<usize, String>,
    /// Ranks whose wait for this rank timed out and that were not answered yet.
    asked_by: Vec<usize>,
    /// Ranks that answered that they are waiting as well.
    also_waiting: HashSet<usize>,
    /// Ranks that answered that they are in a long phase, or wait for a rank that is.
    busy: HashMap<usize, Busy>,
    /// The first failure of any rank; it ends all waits.
    failure: Option<TransportError>,
}

impl<M, L: Monitor<MailboxState<M>>> Default for Mailbox<M, L> {
    fn default() -> Self {
        let state = MailboxState {
            queues: HashMap::new(),
            left: HashMap::new(),
            asked_by: Vec::new(),
            also_waiting: HashSet::new(),
            busy: HashMap::new(),
            failure: None,
        };
        Self {
            state: L::new(state),
            messages: PhantomData,
        }
    }
}

impl<M, L: Monitor<MailboxState<M>>> Mailbox<M, L> {
    /// Puts a message of rank `from` into its queue.
    pub(crate) fn deliver(&self, from: usize, channel: Channel, message: M) {
        self.state
            .lock()
            .queues
            .entry((channel, from))
            .or_default()
            .push_back(message);
        self.state.notify_all();
    }

    /// Records that rank `from` finished and left in order: only waits for it fail. The first
    /// reason is kept.
    pub(crate) fn leave(&self, from: usize, why: &str) {
        self.state
            .lock()
            .left
            .entry(from)
            .or_insert_with(|| why.to_string());
        self.state.notify_all();
    }

    /// Records that rank `peer` ended out of order: every wait fails, unless the peer had left
    /// before or another failure came first.
    pub(crate) fn die(&self, peer: usize, why: &str) {
        let mut state = self.state.lock();
        if !state.left.contains_key(&peer) {
            let lost = || TransportError::Lost {
                peer,
                why: why.to_string(),
            };
            state.failure.get_or_insert_with(lost);
            self.state.notify_all();
        }
    }

    /// Records that rank `by` failed: every wait fails. The first failure is kept.
    pub(crate) fn abort(&self, by: usize, reason: &str, is_hang: bool) {
        let aborted = || TransportError::Aborted {
            by,
            reason: reason.to_string(),
            is_hang,
        };
        self.state.lock().failure.get_or_insert_with(aborted);
        self.state.notify_all();
    }

    /// The first failure of any rank.
    pub(crate) fn failure(&self) -> Option<TransportError> {
        self.state.lock().failure.clone()
    }

    /// Whether rank `peer` finished and left in order.
    pub(crate) fn has_left(&self, peer: usize) -> bool {
        self.state.lock().left.contains_key(&peer)
    }

    /// Records that rank `from` asks why it has to wait for this rank.
    pub(crate) fn ask(&self, from: usize) {
        self.state.lock().asked_by.push(from);
        self.state.notify_all();
    }

    /// Records the answer of rank `from` that it is waiting as well.
    pub(crate) fn answer(&self, from: usize) {
        self.state.lock().also_waiting.insert(from);
        self.state.notify_all();
    }

    /// Records the answer of rank `from` that it is in a long phase, or waits for a rank that is.
    pub(crate) fn answer_busy(&self, from: usize, busy: Busy) {
        self.state.lock().busy.insert(from, busy);
        self.state.notify_all();
    }

    /// Discards earlier answers of rank `peer`, which is about to be asked another time.
    pub(crate) fn forget_answers(&self, peer: usize) {
        let mut state = self.state.lock();
        state.also_waiting.remove(&peer);
        state.busy.remove(&peer);
    }

    /// Takes the next message of `from`, waiting until `deadline`. A message that has arrived is
    /// returned even if its sender is gone by now, because a rank that finishes first leaves its
    /// last messages here.
    ///
    /// The wait ends early if another rank reports a timeout on this one, but only in the second
    /// half of this rank's own timeout. Before that this rank started late and is itself the cause.
    pub(crate) fn take(
        &self,
        from: usize,
        channel: Channel,
        deadline: Deadline,
    ) -> Result<M, TransportError> {
        let arrived = |state: &mut MailboxState<M>| {
            let message = state.next(from, channel);
            message.map(Ok).or_else(|| state.gone(from).map(Err))
        };
        if let Some(end) = self.wait(deadline.half(), arrived) {
            return end;
        }
        let arrived = |state: &mut MailboxState<M>| {
            let asked = !state.asked_by.is_empty();
            arrived(state).or_else(|| asked.then_some(Err(TransportError::Timeout)))
        };
        self.wait(deadline.at(), arrived)
            .unwrap_or(Err(TransportError::Timeout))
    }

    /// Waits until `deadline` for questions to this rank and for the answer of `peer`, which was
    /// asked. If it is `known` that `peer` is waiting as well, that answer does not end the wait.
    pub(crate) fn wait_overdue(
        &self,
        peer: usize,
        channel: Channel,
        known: bool,
        deadline: Instant,
    ) -> TimeoutReport<M> {
        let news = |state: &mut MailboxState<M>| {
            let heard = state.heard(peer, channel);
            let answered = heard.busy.is_some() || heard.also_waiting && !known;
            let ended = heard.message.is_some() || heard.failure.is_some();
            (answered || ended || !heard.asked_by.is_empty()).then_some(heard)
        };
        self.wait(deadline, news)
            .unwrap_or_else(|| self.state.lock().heard(peer, channel))
    }

    /// Whether another rank's wait for this rank has timed out.
    pub(crate) fn is_asked(&self) -> bool {
        !self.state.lock().asked_by.is_empty()
    }

    /// Why `peer` can no longer be reached, if it cannot.
    pub(crate) fn gone(&self, peer: usize) -> Option<TransportError> {
        self.state.lock().gone(peer)
    }

    /// Like [`Self::gone`], but waits for the reason until `deadline`.
    pub(crate) fn wait_gone(&self, peer: usize, deadline: Instant) -> Option<TransportError> {
        self.wait(deadline, |state| state.gone(peer))
    }

    fn wait<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&mut MailboxState<M>) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Some(value);
            }
            let left = deadline.saturating_duration_since(clock::now());
            if left == Duration::ZERO {
                return None;
            }
            state = self.state.wait(state, left);
        }
    }
}

impl<M> MailboxState<M> {
    fn next(&mut self, from: usize, channel: Channel) -> Option<M> {
        self.queues
            .get_mut(&(channel, from))
            .and_then(VecDeque::pop_front)
    }

    fn heard(&mut self, peer: usize, channel: Channel) -> TimeoutReport<M> {
        TimeoutReport {
            message: self.next(peer, channel),
            asked_by: std::mem::take(&mut self.asked_by),
            also_waiting: self.also_waiting.contains(&peer),
            busy: self.busy.get(&peer).cloned(),
            failure: self.gone(peer),
        }
    }

    fn gone(&self, peer: usize) -> Option<TransportError> {
        let left = || {
            let why = self.left.get(&peer)?.clone();
            Some(TransportError::Lost { peer, why })
        };
        self.failure.clone().or_else(left)
    }
}

#[cfg(test)]
mod tests;
