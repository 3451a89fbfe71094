//! Moves training runs between Megatron-LM and megaburn, both ways.
//!
//! [`from_megatron`] makes a run of megaburn from a checkpoint of Megatron-LM in the format
//! `torch_dist`, and [`to_megatron`] makes such a checkpoint from a run. Weights and moments are the
//! same to the bit; their order is that of `docs/megatron-checkpoints.md`.

mod args;
mod arguments;
mod buckets;
mod common;
mod dict;
mod error;
mod export;
mod exportable;
mod exported_run;
mod import;
mod model_settings;
mod names;
mod parameter;
mod precision_settings;
mod schedule_settings;
mod schedule_state;
mod settings;
mod steps;
mod tensors;
mod values;

pub use error::MegatronError;
pub use export::{Exported, to_megatron};
pub use import::{FromMegatronConfig, Imported, from_megatron};

/// The name of Megatron-LM's `common.pt` in a run that was made from it. An export begins with its
/// arguments.
const COMMON: &str = "megatron-common.pt";
