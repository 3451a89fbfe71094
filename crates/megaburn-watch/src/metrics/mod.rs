//! Reads `metrics.jsonl` as it grows.

mod events;
mod lines;
mod mark;
mod read;
mod span;
mod thin;

pub(crate) use read::{nothing, quiet_seconds, read_from, size_and_file};
pub(crate) use span::read_steps;
