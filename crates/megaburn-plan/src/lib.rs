//! Predicts a training run before it starts: the memory of each rank, what it sends, the time of a
//! step, and the days and the cost of the run. Nothing is allocated and no GPU is needed.
//!
//! - Memory: [`StageMemory`], from [`MemoryEstimate`](megaburn_train::estimate::MemoryEstimate).
//! - Traffic: [`Traffic`], from shapes.
//! - Time: [`StepTime`], from the FLOPs and bytes of each block, the rates that steps of
//!   `benches/results` reached, and a simulation of the pipeline schedule.
//!
//! ```no_run
//! use megaburn_plan::{Gpu, PlanConfig, PlanError};
//! use megaburn_train::ConfigLayers;
//!
//! fn plan(file: &str) -> Result<(), PlanError> {
//!     let config = ConfigLayers::new().with_file(file)?.load()?;
//!     let layout = config.layout(None)?;
//!     let plan = PlanConfig::new(config, layout).with_gpu(Gpu::H200).plan()?;
//!     println!("{plan}");
//!     Ok(())
//! }
//! ```
//!
//! [`PlanConfig`] makes a [`Plan`], which prints itself, is JSON by `serde`, and draws itself
//! ([`Plan::svg`]). [`SearchConfig`] finds the fastest layouts and settings by the same numbers.
//! [`Walk`] lets ranks of the run call their collectives, each without the others.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod block;
mod calibration;
mod candidates;
mod changes;
mod ends;
mod error;
mod fastest;
mod fitting;
mod gpu;
mod in_parallel;
mod links;
mod machine;
mod memory;
mod params;
mod parts;
mod pipeline;
mod plan;
mod rank;
mod search;
mod search_text;
mod settings_trials;
mod step;
mod svg;
mod text;
mod traffic;
mod trial;
mod walk;

pub use changes::Change;
pub use error::PlanError;
pub use gpu::Gpu;
pub use memory::StageMemory;
pub use plan::{Plan, PlanConfig, PlannedBatch, PlannedModel, PlannedRun};
pub use search::{FoundRun, HEADROOM, Refused, SearchConfig, SearchResult};
pub use step::StepTime;
pub use traffic::Traffic;
pub use walk::Walk;
