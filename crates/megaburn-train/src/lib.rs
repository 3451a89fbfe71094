//! Configuration, training loop, metrics and resilience.

pub mod config;
pub mod console;
mod error;
mod exit;
pub mod memory;
pub mod metrics;
pub mod plot;
pub mod schedule;
pub mod signal;

pub use config::{ConfigLayers, TrainConfig};
pub use error::TrainError;
pub use exit::Exit;
