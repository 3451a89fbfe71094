//! Turns the gradients of micro-batches into an update of parameters that are sharded over ranks.
//!
//! ```text
//! GradientAccumulator::begin_micro_batch        the last micro-batch overlaps sums with backward
//! backward ─▶ GradientAccumulator::accumulate   f32, every micro-batch
//!             ::end_micro_batch                 sums over ranks now if gradients are sharded
//!             ::reduce                          else sums once over ranks with the same shard
//!             ::scale(1 / tokens)               the loss is a sum over tokens, divided once
//!             ::norm                            each logical element once, the same on every rank
//!             ::clip                            Megatron's coefficient
//!             Optimizer::step                   the module with its parameters updated
//! ```
//!
//! On GPUs the host waits for none of this: norm and coefficient stay on the device. The host sees
//! a non-finite norm only when it reads it, after the update; that update did nothing.
//!
//! Gradients, masters and moments are stored in f32 unless configured otherwise, and all arithmetic
//! is in f32. Narrower parameters ([`Optimizer::cast_params`]) are roundings of f32 masters that
//! the optimizer keeps; without them, updates smaller than the spacing of bf16 numbers would be
//! lost.
//!
//! Ranks that hold the same shard need not all keep a full copy: [`Sharding`] says which rank keeps
//! which part of optimizer state, gradients and parameters (ZeRO).
//!
//! The rates of an update, [`LrSchedule`] and [`WeightDecaySchedule`], are pure functions of the
//! number of samples trained on. f16 runs scale their loss ([`LossScaler`]).
//!
//! All data is keyed by a parameter's path and described by its `megaburn_mesh::ShardSpec`.

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod accumulator;
mod amaxes;
mod burn_optimizers;
mod clip;
mod device_scalar;
mod dtype;
mod element_statistics;
mod error;
mod finite_weights;
mod full_weights;
mod grad_zero_count;
mod grads_params;
mod held_state;
mod leaf;
mod loss_scaler;
mod masters;
mod moment;
mod moment_bits;
mod norm;
mod norm_partials;
mod offload;
mod optimizer;
mod overlap;
mod param_grad;
mod plan;
mod reduce;
mod rule;
mod scale;
mod schedule;
mod sharding;
mod skip_nonfinite;
mod state;
mod state_dtype;
mod step;
#[cfg(test)]
mod testing;
mod tied_grads;
mod visit;

pub use accumulator::GradientAccumulator;
pub use burn_optimizers::{Reads, ShardRule, ShardedOptimizer, lbfgs_step};
pub use device_scalar::DeviceScalar;
pub use dtype::Dtype;
pub use error::OptimError;
pub use held_state::{HeldState, HostPart, StateShape, StateTensor};
pub use loss_scaler::{LossScaleConfig, LossScaler};
pub use moment::Moment;
pub use norm::GradNorm;
pub use offload::D2hCopy;
pub use optimizer::Optimizer;
pub use rule::{
    AdamWConfig, LionConfig, MuonConfig, MuonScale, MuonTpMode, NewtonSchulz, Rates, SgdConfig,
};
pub use schedule::{Decay, LrSchedule, WeightDecaySchedule, WeightDecayStyle, WsdStyle};
pub use sharding::{DelayedScale, Fp8Param, Sharding, ShardingConfig, ShardingLevel};
pub use state_dtype::StateDtype;
