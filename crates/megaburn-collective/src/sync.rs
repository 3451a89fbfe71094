//! The synchronization primitives of [`crate::mailbox`]. `tests/mailbox_model.rs` compiles the
//! mailbox with loom's instead.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
