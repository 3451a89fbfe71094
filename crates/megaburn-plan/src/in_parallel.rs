//! Work on all cores.

use std::{
    num::NonZero,
    panic,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// The results for all items, in their order.
pub(crate) fn in_parallel<I: Sync, T: Send>(items: &[I], of: impl Fn(&I) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else {
                return done;
            };
            done.push((at, of(item)));
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let mut all = thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ended = started.into_iter().map(|thread| {
            let done = thread.join();
            done.unwrap_or_else(|cause| panic::resume_unwind(cause))
        });
        ended.flatten().collect::<Vec<_>>()
    });
    all.sort_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, result)| result).collect()
}
