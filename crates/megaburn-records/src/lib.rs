//! Records and files of full modules, read into shards and written from them.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
