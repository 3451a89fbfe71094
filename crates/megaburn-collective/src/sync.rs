//! The primitives that [`crate::mailbox`] waits with. `tests/mailbox_model.rs` compiles the mailbox
//! with loom's in their place.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
