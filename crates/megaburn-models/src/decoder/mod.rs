//! The decoder-only transformer of every family: embedding, blocks of attention and MLP, norm, head.
//!
//! Source: Vaswani et al. (2017); Radford et al. (2019) for GPT-2; Touvron et al. (2023) for Llama.

mod ahead;
mod attention;
mod block;
mod cached;
mod config;
mod context;
mod dropout;
mod experts;
mod init;
mod latent;
mod model;
mod mtp;
mod recompute;
mod stage;

pub use ahead::{Ahead, StageLosses, ahead_in_row};
pub use attention::Attention;
pub use block::Block;
pub use cached::DecoderCache;
pub use config::{DecoderConfig, Positions};
pub(crate) use config::{LARGEST, MOST_LAYERS};
pub use dropout::Dropout;
pub use experts::Experts;
pub use latent::LatentAttention;
pub use model::Decoder;
pub use mtp::Mtp;
pub(crate) use recompute::Segment;
pub use recompute::{Recompute, RecomputeBlocks};
pub use stage::Stage;
