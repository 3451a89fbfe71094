//! Configuration, training loop, metrics and resilience.

mod assets;
mod attention_line;
pub mod config;
pub mod console;
mod data;
pub mod device;
mod error;
mod exit;
mod failure;
mod lock;
pub mod memory;
pub mod metrics;
mod pipeline;
pub mod plot;
mod profile;
mod ranks;
mod report;
mod resume_error;
mod run;
pub mod signal;
pub mod text;
mod trainer;
pub mod verify;

pub use config::{ConfigLayers, TrainConfig};
pub use data::RunData;
pub use error::TrainError;
pub use exit::Exit;
pub use resume_error::ResumeError;
pub use run::pretrain;
pub use trainer::{Culprit, Progress, Resumed, Trainer};
