//! How the first failure of any rank reaches all others: along the tree, each rank passing it on to
//! the ranks next to it.
//!
//! A rank confirms what it hears at once, from a thread that reads its connection. A rank that does
//! not (it is stopped, dead or has left) is passed over: the sender calls the ranks behind it. When
//! ranks die, each part of the tree that is left holds a rank next to a dead one, which sees its
//! connection end. So all ranks hear the name of a rank that died, and not of one that was cut off.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    endpoint::Endpoint, line::Line, reader::AT_ONCE, stack::STACK_BYTES, wire::ControlMessage,
};
use crate::{clock, fault::TransportError, tree};

/// A rank that has not confirmed a failure for this long is passed over.
const CONFIRM: Duration = Duration::from_millis(300);
/// The same for a rank behind one that was passed over: a whole host may be lost.
const CONFIRM_BEHIND: Duration = Duration::from_millis(150);

impl Endpoint {
    /// The message that passes on the first failure that this rank knows.
    pub(super) fn failure(&self) -> Option<ControlMessage> {
        match self.mailbox.failure()? {
            TransportError::Lost { peer, why } => Some(ControlMessage::Lost { rank: peer, why }),
            TransportError::Aborted {
                by,
                reason,
                is_hang,
            } => Some(ControlMessage::Abort {
                by,
                reason,
                is_hang,
            }),
            TransportError::Timeout | TransportError::Stalled(_) => None,
        }
    }

    /// Passes on the failure `word` to the ranks next to this one, but not to rank `from`, which said
    /// it; and in the background past those that do not confirm it. The rank that found it also says
    /// so to all ranks that it is connected to. Only the first failure is passed on.
    pub(super) fn spread(self: &Arc<Self>, word: ControlMessage, from: Option<usize>) {
        if !self.has_started() || !self.flood.begin() {
            return;
        }
        // No thread is started first: on a busy host each would take a while to run.
        let next: Vec<_> = self
            .neighbours()
            .filter(|next| Some(*next) != from)
            .map(|next| (next, self.is_said(next, &word)))
            .collect();
        let endpoint = self.clone();
        let spread = move || {
            endpoint.pass_on(&word, from.is_none(), &next);
            endpoint.flood.end();
        };
        // Without a thread the failure has been passed on, but not past ranks that do not confirm it.
        if thread::Builder::new()
            .name("failure".into())
            .stack_size(STACK_BYTES)
            .spawn(spread)
            .is_err()
        {
            self.flood.end();
        }
    }

    /// Sends `word` to a rank next to this one, but only if that does not block.
    fn is_said(&self, to: usize, word: &ControlMessage) -> bool {
        let line = self.open_line(to).filter(|_| !self.is_gone(to, word));
        line.is_some_and(|line| line.say(word, clock::now() + AT_ONCE))
    }

    /// Whether `word` need not be said to `rank`, which has left or died.
    fn is_gone(&self, rank: usize, word: &ControlMessage) -> bool {
        matches!(word, ControlMessage::Lost { rank: lost, .. } if *lost == rank)
            || self.mailbox.has_left(rank)
    }

    fn pass_on(self: &Arc<Self>, word: &ControlMessage, is_finder: bool, next: &[(usize, bool)]) {
        let mut others = self.open_lines();
        others.retain(|(rank, _)| is_finder && !self.is_neighbour(*rank));
        let others = others.into_iter().map(|(_, line)| line).collect();
        thread::scope(|scope| {
            let tell = || tell_all(others, word, clock::now() + CONFIRM);
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            // Without a thread they hear along the tree alone.
            let _ = thread.spawn_scoped(scope, tell);
            self.deliver_all(next, self.rank, word, CONFIRM);
        });
    }

    /// Passes `word` on to several ranks at once, each with whether it was sent already; and past
    /// those that do not confirm it within `patience` to the ranks behind them, as seen from rank
    /// `via`.
    fn deliver_all(
        self: &Arc<Self>,
        ranks: &[(usize, bool)],
        via: usize,
        word: &ControlMessage,
        patience: Duration,
    ) {
        thread::scope(|scope| {
            for &(to, is_said) in ranks {
                let deliver = move || {
                    if !self.is_confirmed(to, word, is_said, patience) {
                        let behind = tree::neighbours(to, self.world_size);
                        let behind = behind.filter(|next| *next != via && *next != self.rank);
                        let behind: Vec<_> = behind.map(|next| (next, false)).collect();
                        self.deliver_all(&behind, to, word, CONFIRM_BEHIND);
                    }
                };
                // Without a thread the ranks behind it hear from others, or find a connection closed.
                let thread = thread::Builder::new().stack_size(STACK_BYTES);
                let _ = thread.spawn_scoped(scope, deliver);
            }
        });
    }

    fn is_confirmed(
        self: &Arc<Self>,
        to: usize,
        word: &ControlMessage,
        is_said: bool,
        patience: Duration,
    ) -> bool {
        if self.is_gone(to, word) {
            return false;
        }
        let until = clock::now() + patience;
        let is_late = || clock::now() >= until;
        let say = || {
            let line = self.line(to, until, &is_late);
            line.is_ok_and(|line| line.say(word, until))
        };
        (is_said || say()) && self.flood.await_heard(to, until)
    }
}

/// Sends to all at once, so that one stopped rank does not delay the message to the others. A
/// connection that does not accept it in time is shut down, which the rank notices as well.
pub(super) fn tell_all(lines: Vec<Arc<Line>>, word: &ControlMessage, deadline: Instant) {
    const THREADS: usize = 32;
    let each = lines.len().div_ceil(THREADS).max(1);
    thread::scope(|scope| {
        for part in lines.chunks(each) {
            let tell = move || {
                for line in part {
                    line.last_word(word, deadline.max(clock::now() + AT_ONCE));
                }
            };
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            if thread.spawn_scoped(scope, tell).is_err() {
                part.iter().for_each(|line| line.last_word(word, deadline));
            }
        }
    });
}
