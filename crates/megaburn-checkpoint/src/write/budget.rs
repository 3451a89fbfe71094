//! Bounds the memory of the tensors that are being written.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Bytes of tensors that may be in memory at once. A tensor that is larger than that is in memory
/// alone.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: Mutex<Used>,
    /// Signals that bytes are free again.
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    bytes: usize,
    /// The most bytes that were used at once.
    #[cfg(test)]
    peak: usize,
}

/// Bytes of a [`Budget`], which are free again when this is dropped.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    budget: &'a Budget,
    bytes: usize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            used: Mutex::default(),
            freed: Condvar::new(),
        }
    }

    /// Waits until there is room for `bytes` bytes, or all others are free.
    pub(super) fn reserve(&self, bytes: usize) -> Reservation<'_> {
        let is_full =
            |used: &mut Used| used.bytes > 0 && used.bytes.saturating_add(bytes) > self.limit;
        let used = self.freed.wait_while(self.used(), is_full);
        let mut used = used.unwrap_or_else(PoisonError::into_inner);
        used.bytes += bytes;
        #[cfg(test)]
        {
            used.peak = used.peak.max(used.bytes);
        }
        Reservation {
            budget: self,
            bytes,
        }
    }

    #[cfg(test)]
    pub(super) fn peak(&self) -> usize {
        self.used().peak
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.budget.used().bytes -= self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn what_does_not_fit_waits_and_what_is_larger_than_all_comes_alone() {
        let budget = Budget::new(10);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let reserve = scope.spawn(|| {
                for bytes in [4, 6, 3, 0, 25, 8, 2] {
                    sender.send(budget.reserve(bytes)).unwrap();
                }
                drop(sender);
            });
            let mut held = std::collections::VecDeque::new();
            for expected in [4, 6, 3, 0, 25, 8, 2] {
                // Frees the oldest ones until the next one fits.
                let next = loop {
                    match receiver.try_recv() {
                        Ok(next) => break next,
                        Err(_) if held.is_empty() => break receiver.recv().unwrap(),
                        Err(_) => drop(held.pop_front()),
                    }
                };
                assert_eq!(next.bytes, expected);
                held.push_back(next);
            }
            reserve.join().unwrap();
        });
        assert_eq!(budget.used().bytes, 0);
        assert_eq!(budget.peak(), 25);
    }
}
