//! The decoder-only transformer of every family: embedding, blocks of attention and MLP, norm,
//! head.
//!
//! Source: Vaswani et al. (2017); Radford et al. (2019) for GPT-2; Touvron et al. (2023) for Llama.

mod block;
mod cached;
mod config;
mod experts;
mod init;
mod mla;
mod model;
mod mtp;
mod mtp_targets;
mod options;
mod positions;
mod recompute;
mod stage;

pub use block::Block;
pub use cached::DecoderCache;
pub use config::{DecoderConfig, Positions};
pub(crate) use config::{LARGEST, MOST_LAYERS};
pub use experts::Experts;
pub use mla::Mla;
pub use model::Decoder;
pub use mtp::Mtp;
pub use mtp_targets::{MtpTargets, StageLosses, shift_for_depth};
pub use options::{Dropout, ModelGroups, ModelOptions};
pub(crate) use recompute::Segment;
pub use recompute::{Recompute, RecomputeBlocks};
