//! PyTorch's checkpoint files, read and written without executing anything.
//!
//! PyTorch stores objects as pickles, which are programs: loading one with Python calls whatever
//! it names. [`Pickle`](pickle::Pickle) reads a pickle as data instead. What Python would call is
//! named in the result and never called.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

pub mod pickle;
