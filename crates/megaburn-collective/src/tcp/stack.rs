//! The stacks of threads that handle connections, of which a rank has many.

/// The stack of a thread that handles a connection: it parses short messages.
pub(super) const STACK_BYTES: usize = 512 << 10;
