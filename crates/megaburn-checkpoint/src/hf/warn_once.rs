use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Warns with a line, once in this process: each rank that is a thread opens the same folder.
pub(super) fn warn_once(line: String) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.insert(line.clone()) {
        tracing::warn!("{line}");
    }
}
