//! Where a rank's messages wait for it, and where it learns that none will come.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::PoisonError,
    time::{Duration, Instant},
};

use crate::{
    busy::Busy,
    clock,
    deadline::Deadline,
    fault::{Channel, TransportError},
    sync::{Condvar, Mutex, MutexGuard},
};

/// What a rank hears after its time was over.
#[derive(Debug)]
pub(crate) struct TimeoutReport<M> {
    /// What it waited for, if that has arrived after all.
    pub(crate) message: Option<M>,
    /// Ranks that ask this one why they wait for it.
    pub(crate) asked_by: Vec<usize>,
    /// Whether the rank waited for waits as well.
    pub(crate) also_waiting: bool,
    /// Whether the rank waited for, or one that it waits for, works on something long.
    pub(crate) busy: Option<Busy>,
    /// The failure that ends all waits.
    pub(crate) failure: Option<TransportError>,
}

/// What has arrived for one rank and was not taken yet.
#[derive(Debug)]
pub(crate) struct Mailbox<M> {
    state: Mutex<MailboxState<M>>,
    changed: Condvar,
}

#[derive(Debug)]
struct MailboxState<M> {
    queues: HashMap<(Channel, usize), VecDeque<M>>,
    left: HashMap<usize, String>,
    /// Whose time is over and who were not answered yet.
    asked_by: Vec<usize>,
    /// Who answered that they wait as well.
    also_waiting: HashSet<usize>,
    /// Who answered that they work, or wait for one that works.
    busy: HashMap<usize, Busy>,
    /// The first failure of any rank: nobody can go on.
    failure: Option<TransportError>,
}

impl<M> Default for Mailbox<M> {
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
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }
}

impl<M> Mailbox<M> {
    /// Puts a message of rank `from` into its queue.
    pub(crate) fn deliver(&self, from: usize, channel: Channel, message: M) {
        self.lock()
            .queues
            .entry((channel, from))
            .or_default()
            .push_back(message);
        self.changed.notify_all();
    }

    /// Rank `from` finished and left in order: only who still waits for it fails. The first reason
    /// stands.
    pub(crate) fn leave(&self, from: usize, why: &str) {
        self.lock()
            .left
            .entry(from)
            .or_insert_with(|| why.to_string());
        self.changed.notify_all();
    }

    /// Rank `peer` ended out of order: every wait fails, unless it left before or another failure
    /// came first.
    pub(crate) fn die(&self, peer: usize, why: &str) {
        let mut state = self.lock();
        if !state.left.contains_key(&peer) {
            let lost = || TransportError::Lost {
                peer,
                why: why.to_string(),
            };
            state.failure.get_or_insert_with(lost);
            self.changed.notify_all();
        }
    }

    /// Rank `by` failed: every wait fails. The first failure stands.
    pub(crate) fn abort(&self, by: usize, reason: &str) {
        let aborted = || TransportError::Aborted {
            by,
            reason: reason.to_string(),
        };
        self.lock().failure.get_or_insert_with(aborted);
        self.changed.notify_all();
    }

    /// Rank `from` asks why it waits for this rank.
    pub(crate) fn ask(&self, from: usize) {
        self.lock().asked_by.push(from);
        self.changed.notify_all();
    }

    /// Rank `from` answers that it waits as well.
    pub(crate) fn answer(&self, from: usize) {
        self.lock().also_waiting.insert(from);
        self.changed.notify_all();
    }

    /// Rank `from` answers that it works on something long, or waits for a rank that does.
    pub(crate) fn answer_busy(&self, from: usize, busy: Busy) {
        self.lock().busy.insert(from, busy);
        self.changed.notify_all();
    }

    /// Forgets what rank `peer` answered before: it is about to be asked anew.
    pub(crate) fn forget_answers(&self, peer: usize) {
        let mut state = self.lock();
        state.also_waiting.remove(&peer);
        state.busy.remove(&peer);
    }

    /// Takes the next message of `from`, waiting until `deadline`. What has arrived is handed out
    /// even when its sender is gone since: a rank that finished first left its last words here.
    ///
    /// The wait is over earlier where another rank's is, unless this rank began late: with less than
    /// half of its time over, it is the one to blame.
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

    /// What this rank hears until `deadline` from those that ask it and from `peer`, whom it asked;
    /// an answer that is `known` is no news.
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
            .unwrap_or_else(|| self.lock().heard(peer, channel))
    }

    /// Whether another rank's time is over that waits for this one.
    pub(crate) fn is_asked(&self) -> bool {
        !self.lock().asked_by.is_empty()
    }

    /// Why `peer` can no longer be talked to, if it cannot.
    pub(crate) fn gone(&self, peer: usize) -> Option<TransportError> {
        self.lock().gone(peer)
    }

    /// The same, waiting for the reason until `deadline`.
    pub(crate) fn wait_gone(&self, peer: usize, deadline: Instant) -> Option<TransportError> {
        self.wait(deadline, |state| state.gone(peer))
    }

    fn wait<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&mut MailboxState<M>) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Some(value);
            }
            let left = deadline.saturating_duration_since(clock::now());
            if left == Duration::ZERO {
                return None;
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A rank that panicked while holding the lock left the queues whole: every change is one step.
    fn lock(&self) -> MutexGuard<'_, MailboxState<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
