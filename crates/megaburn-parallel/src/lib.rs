//! Tensor- and sequence-parallel layers as ordinary Burn modules.
//!
//! Each layer follows Burn's pattern (`XConfig::new(..).with_y(..).init(&group, &device)?`), takes
//! and returns plain [`burn::tensor::Tensor`]s, and owns its collectives, so that a model's
//! `forward` reads like the paper. In a group of one every layer computes exactly what its Burn
//! counterpart does and never touches a communicator.
//!
//! In a Burn program with its own training loop, the gradients that `backward` returns are correct
//! as they are. Some of Burn's own tools would treat a rank's shard as the full parameter:
//!
//! - Optimizers that read full parameters (LAMB, Muon, Adafactor, L-BFGS), and gradient clipping by
//!   norm: use `megaburn-optim`'s `ShardedOptimizer`.
//! - LoRA and quantisation: use [`ShardedLora`] and [`ShardedQuantizer`].
//! - Records: a shard refuses to be saved. Use `megaburn-records`.
//! - A plain Burn norm on sequence shards only gets the gradient of its own tokens. Use [`Norm`] of
//!   this crate instead.
//!
//! [`parallelize`] splits a model of Burn's layers by a plan of path patterns.
//!
//! Activations are `[seq, batch, hidden]`. With sequence parallelism the tensors between layers
//! hold this rank's shard of the sequence.
//!
//! ```
//! use burn::{prelude::Device, tensor::Tensor};
//! use megaburn_collective::{GroupOptions, run_threads};
//! use megaburn_parallel::{ParallelError, ParallelLinearConfig};
//!
//! let ranks = run_threads(2, GroupOptions::default(), |group| {
//!     let device = Device::flex();
//!     let up = ParallelLinearConfig::column(8, 32).with_name("up").init(&group, &device)?;
//!     let down = ParallelLinearConfig::row(32, 8).with_name("down").init(&group, &device)?;
//!     assert_eq!(up.weight.dims(), [8, 16]); // half of the columns
//!     let y = down.forward(up.forward(Tensor::<3>::ones([4, 1, 8], &device)));
//!     Ok::<_, ParallelError>(y.into_data())
//! });
//! let ranks: Vec<_> = ranks.into_iter().map(Result::unwrap).collect();
//! assert_eq!(ranks[0], ranks[1]);
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

// `#[derive(Sharded)]` names this crate, in this crate too.
extern crate self as megaburn_parallel;

mod adapters;
mod attention;
mod block_observer;
mod block_statistics;
mod context;
mod cross_entropy;
mod display;
mod dropout;
mod embedding;
mod encoder_rows;
mod error;
mod init;
mod kv_cache;
mod linear;
mod max_logits;
mod mlp;
mod moe;
mod norm;
mod offload;
mod parallelize;
mod params;
mod position;
mod recomputable;
mod recompute;
mod replica;
mod replicated_parts;
mod residual;
mod selective_save;
mod shards;
mod split_norm;
mod stretches;
mod tokens;
mod unsaved_shard;
mod vocab_bias;

pub use adapters::{ShardedAdapter, ShardedLora, ShardedQuantizer};
pub use attention::{
    ALIBI_FEATURES, Alibi, AlibiKeys, Attention, AttentionGroups, CrossAttention,
    CrossAttentionConfig, MultiLatentAttentionConfig, PositionTables, QkClip, QkNorm, QkNormKind,
    RelativeBias, RelativeBiasConfig, SelfAttentionConfig,
};
pub use block_observer::{BlockObserver, BlockValues};
pub use block_statistics::{BlockStatistics, CountedForward};
pub use context::{
    ContextComm, ContextParallel, ContextShare, HybridContextParallel, PackedDocuments, Segment,
};
pub use cross_entropy::{CrossEntropy, CrossEntropyConfig};
pub use dropout::{ParallelDropout, ParallelDropoutConfig};
pub use embedding::{VocabParallelEmbedding, VocabParallelEmbeddingConfig};
pub use encoder_rows::EncoderRows;
pub use error::ParallelError;
pub use kv_cache::{KvCache, Packed};
pub use linear::{
    CurrentTokens, LinearPrecision, ParallelLinear, ParallelLinearConfig, PrecisionScope,
    QuantizedLayer, ReplicatedLinear, ReplicatedLinearConfig, Split,
};
pub use mlp::{Activation, Mlp, MlpConfig};
pub use moe::{
    BalanceChoice, Capacity, CapacityScope, Dispatcher, DropPolicy, ExpertGroups, ExpertLoad,
    ExpertMlp, LoadBalance, LoadCounts, Moe, MoeConfig, MoeOptions, QUANTILE_BINS, Router,
    SharedGate, quantile_biases,
};
pub use norm::{Norm, NormConfig, NormKind};
pub use offload::ActivationOffload;
pub use parallelize::{
    Layers, ParallelMhaInput, ParallelMultiHeadAttention, ParallelPlan, ReplicatedDropout, Rule,
    Style, parallelize,
};
pub use params::{LazyParam, lazy_params, load_params, read_params};
pub use position::{PositionEmbedding, PositionEmbeddingConfig};
pub use recomputable::Recomputable;
pub use recompute::{checkpoint_residual, offload_residual, recomputed};
pub use residual::Residual;
pub use selective_save::SelectiveSave;
pub use shards::{
    PlanBuilder, Sharded, check_plan, is_transposed_in_files, main_grads, quantized_layers,
    shard_plan, vector_grads,
};
pub use tokens::{BatchContext, TokenBlock};
pub use vocab_bias::{VocabParallelBias, VocabParallelBiasConfig};
