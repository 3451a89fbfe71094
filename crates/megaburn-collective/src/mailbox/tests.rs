//! The mailbox under every interleaving of its callers, explored by loom.
//!
//! The mailbox is used with loom's mutex and condition variable instead of the standard library's.
//! Loom never lets a wait time out; a wait that is never woken is found as a deadlock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use loom::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};

use super::{MailboxState, Monitor};
use crate::{deadline::Deadline, fault::TransportError};

/// A mailbox of numbers that loom watches.
type Mailbox = super::Mailbox<u32, LoomMonitor<MailboxState<u32>>>;

/// A monitor of loom.
struct LoomMonitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> for LoomMonitor<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap()
    }

    fn wait<'a>(&'a self, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(guard, time).unwrap().0
    }

    fn notify_all(&self) {
        self.changed.notify_all();
    }
}

type Taken = Result<u32, TransportError>;

fn aborted(by: usize) -> Taken {
    Err(TransportError::Aborted {
        by,
        reason: "broke".into(),
        is_hang: false,
    })
}

fn lost(peer: usize) -> Taken {
    Err(TransportError::Lost {
        peer,
        why: "gone".into(),
    })
}

fn take(mailbox: &Mailbox, from: usize) -> Taken {
    mailbox.take(from, 0, Deadline::after(Duration::from_secs(3600)))
}

/// Runs `peers` concurrently with `owner` in every interleaving.
fn explore<T: 'static>(
    peers: &'static [fn(&Mailbox)],
    owner: impl Fn(&Mailbox) -> T + Sync + Send + 'static,
    check: impl Fn(T) + Sync + Send + 'static,
) -> usize {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    loom::model(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        let threads: Vec<_> = peers
            .iter()
            .map(|peer| {
                let mailbox = mailbox.clone();
                thread::spawn(move || peer(&mailbox))
            })
            .collect();
        check(owner(&mailbox));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
    runs.load(Ordering::Relaxed)
}

#[test]
fn messages_of_two_ranks_arrive_once_and_in_order() {
    let runs = explore(
        &[
            |mailbox| {
                mailbox.deliver(1, 0, 10);
                mailbox.deliver(1, 0, 11);
            },
            |mailbox| mailbox.deliver(2, 0, 20),
        ],
        |mailbox| [take(mailbox, 2), take(mailbox, 1), take(mailbox, 1)],
        |taken| assert_eq!(taken, [Ok(20), Ok(10), Ok(11)]),
    );
    assert!(runs > 10, "only {runs} interleavings were explored");
}

#[test]
fn the_last_words_of_a_rank_that_left_are_heard_before_its_leaving() {
    explore(
        &[|mailbox| {
            mailbox.deliver(1, 0, 10);
            mailbox.leave(1, "gone");
            mailbox.die(1, "its connection ended, as it does after leaving");
        }],
        |mailbox| [take(mailbox, 1), take(mailbox, 1)],
        |taken| assert_eq!(taken, [Ok(10), lost(1)]),
    );
}

#[test]
fn a_rank_that_leaves_disturbs_nobody_who_waits_for_another() {
    explore(
        &[
            |mailbox| mailbox.leave(1, "gone"),
            |mailbox| mailbox.deliver(2, 0, 20),
        ],
        |mailbox| take(mailbox, 2),
        |taken| assert_eq!(taken, Ok(20)),
    );
}

#[test]
fn a_death_ends_the_wait_for_any_rank() {
    explore(
        &[
            |mailbox| mailbox.die(1, "gone"),
            |mailbox| mailbox.deliver(2, 0, 20),
        ],
        |mailbox| [take(mailbox, 2), take(mailbox, 2)],
        |[first, second]| {
            assert!(first == Ok(20) || first == lost(1), "{first:?}");
            let late = first.is_err() && second == Ok(20);
            assert!(late || second == lost(1), "{first:?} {second:?}");
        },
    );
}

#[test]
fn of_two_failures_one_stands_for_all_waiters() {
    explore(
        &[
            |mailbox| mailbox.abort(1, "broke", false),
            |mailbox| mailbox.abort(2, "broke", false),
        ],
        |mailbox| [take(mailbox, 1), take(mailbox, 2), take(mailbox, 1)],
        |[first, second, third]| {
            assert!(first == aborted(1) || first == aborted(2), "{first:?}");
            assert!(
                second == first && third == first,
                "{first:?} {second:?} {third:?}"
            );
        },
    );
}

#[test]
fn two_threads_that_wait_in_different_groups_are_both_woken() {
    loom::model(|| {
        let mailbox = Arc::new(Mailbox::default());
        let other = mailbox.clone();
        let waiter = thread::spawn(move || take(&other, 2));
        let sender = mailbox.clone();
        let peer = thread::spawn(move || {
            sender.deliver(1, 0, 10);
            sender.deliver(2, 0, 20);
        });
        assert_eq!(take(&mailbox, 1), Ok(10));
        assert_eq!(waiter.join().unwrap(), Ok(20));
        peer.join().unwrap();
    });
}

#[test]
fn who_asks_why_a_rank_is_gone_is_told() {
    explore(
        &[
            |mailbox| mailbox.deliver(1, 0, 10),
            |mailbox| mailbox.leave(1, "gone"),
        ],
        |mailbox| mailbox.wait_gone(1, Instant::now() + Duration::from_secs(3600)),
        |why| assert_eq!(why.map(Err), Some(lost(1))),
    );
}
