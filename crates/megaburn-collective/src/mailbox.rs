use std::{
    collections::{HashMap, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    message::Message,
    transport::{Channel, TransportError},
};

/// What has arrived for one rank and was not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<(Channel, usize), VecDeque<Message>>,
    lost: HashMap<usize, String>,
    aborted: Option<(usize, String)>,
}

impl Mailbox {
    /// Puts a message of rank `from` into its queue.
    pub(crate) fn deliver(&self, from: usize, channel: Channel, message: Message) {
        self.lock().queues.entry((channel, from)).or_default().push_back(message);
        self.changed.notify_all();
    }

    /// Nothing more will come from `from`. The first reason stands.
    pub(crate) fn lose(&self, from: usize, why: &str) {
        self.lock().lost.entry(from).or_insert_with(|| why.to_string());
        self.changed.notify_all();
    }

    /// Rank `by` failed. The first failure stands.
    pub(crate) fn abort(&self, by: usize, reason: &str) {
        self.lock().aborted.get_or_insert_with(|| (by, reason.to_string()));
        self.changed.notify_all();
    }

    /// Takes the next message of `from`, waiting until `deadline`. What has arrived is handed out
    /// even when its sender is gone since: a rank that finished first left its last words here.
    pub(crate) fn take(
        &self,
        from: usize,
        channel: Channel,
        deadline: Instant,
    ) -> Result<Message, TransportError> {
        let mut state = self.lock();
        loop {
            if let Some(message) =
                state.queues.get_mut(&(channel, from)).and_then(VecDeque::pop_front)
            {
                return Ok(message);
            }
            if let Some((by, reason)) = state.aborted.clone() {
                return Err(TransportError::Aborted { by, reason });
            }
            if let Some(why) = state.lost.get(&from).cloned() {
                return Err(TransportError::Lost { why });
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(TransportError::Timeout);
            }
            state = self
                .changed
                .wait_timeout(state, deadline - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// A rank that panicked while holding the lock left the queues whole: every change is one step.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
