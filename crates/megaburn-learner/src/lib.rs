//! A training strategy for the `Learner` of `burn-train`.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
