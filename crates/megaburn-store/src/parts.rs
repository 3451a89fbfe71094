//! Does the parts of a transfer on a few threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, scope};

use crate::error::StoreError;

/// The most parts that are transferred at the same time.
const NUM_IN_FLIGHT: usize = 4;

/// Calls `transfer` with the number of each part, on up to four threads, and with what says whether
/// to stop: the caller's `is_stopped`, or the failure of another part.
///
/// # Errors
/// The first failure.
pub(crate) fn each_part(
    num_parts: usize,
    is_stopped: &(dyn Fn() -> bool + Sync),
    transfer: impl Fn(usize, &(dyn Fn() -> bool + Sync)) -> Result<(), StoreError> + Sync,
) -> Result<(), StoreError> {
    let next = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let first: Mutex<Option<StoreError>> = Mutex::new(None);
    let is_over = || has_failed.load(Ordering::Relaxed) || is_stopped();
    let work = || {
        while !has_failed.load(Ordering::Relaxed) {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= num_parts {
                return;
            }
            if let Err(error) = transfer(part, &is_over) {
                let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                has_failed.store(true, Ordering::Relaxed);
            }
        }
    };
    scope(|scope| {
        for _ in 1..NUM_IN_FLIGHT.min(num_parts) {
            // Without further threads, this one transfers all parts.
            let name = "megaburn-parts".into();
            let _ = Builder::new().name(name).spawn_scoped(scope, work);
        }
        work();
    });
    let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    first.map_or(Ok(()), Err)
}
