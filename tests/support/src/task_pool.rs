//! Runs tasks concurrently, each with the number of places that it takes.

use std::{
    sync::{Condvar, Mutex, PoisonError},
    thread,
};

/// The number of places that a task takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskSize {
    /// This number of places, or all of them if there are fewer.
    Places(usize),
    /// The task runs alone, after all tasks that share the places.
    Alone,
}

/// Calls `work` with the index of each task, with one thread per task. Tasks start in the order of
/// the list.
pub fn run_all(places: usize, tasks: &[TaskSize], work: impl Fn(usize) + Sync) {
    let free = Mutex::new(places);
    let freed = Condvar::new();
    let lock = || free.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        for (index, task) in tasks.iter().enumerate() {
            let TaskSize::Places(wanted) = *task else {
                continue;
            };
            let taken = wanted.clamp(1, places.max(1));
            let mut left = freed
                .wait_while(lock(), |left| *left < taken)
                .unwrap_or_else(PoisonError::into_inner);
            *left -= taken;
            drop(left);
            let work = &work;
            let lock = &lock;
            let freed = &freed;
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
        .filter(|(_, task)| **task == TaskSize::Alone);
    alone.for_each(|(index, _)| work(index));
}
