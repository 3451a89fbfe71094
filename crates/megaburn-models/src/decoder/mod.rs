//! The transformer of every family: embedding, blocks of attention and MLP, norm, heads. It is a
//! decoder or, with attention in both directions, an encoder.
//!
//! Source: Vaswani et al. (2017); Radford et al. (2019) for GPT-2; Touvron et al. (2023) for Llama.

mod binary_head;
mod block;
mod block_inputs;
mod blocks;
mod builder;
mod cached;
mod config;
mod encoder_decoder;
mod erased_head;
mod experts;
mod family_head;
mod halves;
mod head_parts;
mod init;
mod limits;
mod masked_head;
mod mla;
mod model;
mod mtp;
mod mtp_losses;
mod mtp_targets;
mod options;
mod output_head;
mod parts;
mod positions;
mod positions_config;
mod recompute_options;
mod rotary;
mod routers;
mod stage;
mod validate;
mod validate_halves;

pub use binary_head::BinaryHead;
pub use block::Block;
pub use cached::DecoderCache;
pub use config::DecoderConfig;
pub(crate) use config::megatron_init_std;
pub use experts::Experts;
pub use family_head::{FamilyHead, HeadInit};
pub use head_parts::HeadParts;
pub(crate) use limits::{LARGEST, MOST_LAYERS};
pub use masked_head::MaskedHead;
pub use mla::Mla;
pub use model::Decoder;
pub use mtp::Mtp;
pub use mtp_targets::{MtpTargets, StageLosses, shift_for_depth};
pub use options::{Dropout, LossTerms, ModelGroups, ModelOptions, Precision};
pub use output_head::{LossInput, OutputHead, TokenLosses};
pub use parts::{BlockOrder, Multipliers, NormPlacement};
pub use positions_config::{Positions, Relative, Rotary};
pub(crate) use recompute_options::Segment;
pub use recompute_options::{Recompute, RecomputeBlocks};
