//! The synchronization of [`crate::mailbox`]: the standard library's, which a test replaces by
//! loom's.

use std::{
    ops::DerefMut,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A value behind a mutex, with a condition variable that announces its changes.
pub(crate) trait Monitor<T> {
    /// Exclusive access to the value.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    fn new(value: T) -> Self;

    /// Waits for exclusive access. Ignores poisoning.
    fn lock(&self) -> Self::Guard<'_>;

    /// Gives up access until a change is announced, or for `time` at most.
    fn wait<'a>(&'a self, guard: Self::Guard<'a>, time: Duration) -> Self::Guard<'a>;

    /// Announces a change to all that wait.
    fn notify_all(&self);
}

/// A monitor of the standard library.
#[derive(Debug)]
pub(crate) struct StdMonitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> for StdMonitor<T> {
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
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
        let woken = self.changed.wait_timeout(guard, time);
        woken.unwrap_or_else(PoisonError::into_inner).0
    }

    fn notify_all(&self) {
        self.changed.notify_all();
    }
}
