//! Tasks beside each other, as many as there is room for.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

/// How much room a task takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// So many places; all of them where there are fewer.
    Places(usize),
    /// It runs when no other task does, behind all that share the places.
    Alone,
}

/// Calls `work` once for each task, with its index, on a thread of its own. Tasks begin in their order.
pub(crate) fn run_all(places: usize, tasks: &[Room], work: impl Fn(usize) + Sync) {
    let (free, freed) = (Mutex::new(places), Condvar::new());
    let lock = || free.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        for (index, task) in tasks.iter().enumerate() {
            let Room::Places(wanted) = *task else {
                continue;
            };
            let taken = wanted.clamp(1, places.max(1));
            let mut left = freed
                .wait_while(lock(), |left| *left < taken)
                .unwrap_or_else(PoisonError::into_inner);
            *left -= taken;
            drop(left);
            let (work, lock, freed) = (&work, &lock, &freed);
            scope.spawn(move || {
                work(index);
                *lock() += taken;
                freed.notify_all();
            });
        }
    });
    let alone = tasks
        .iter()
        .enumerate()
        .filter(|(_, task)| **task == Room::Alone);
    alone.for_each(|(index, _)| work(index));
}
