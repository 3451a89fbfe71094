//! Configuration, training loop, metrics and resilience.
