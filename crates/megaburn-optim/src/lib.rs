//! From the gradients of micro-batches to an update, for parameters of which each rank holds a shard.
//!
//! ```text
//! GradientAccumulator::begin_micro_batch        the last one's are sent while backward goes on
//! backward ─▶ GradientAccumulator::accumulate   f32, every micro-batch
//!             ::end_micro_batch                 summed over ranks now, where gradients are shared out
//!             ::reduce                          else one sum over the ranks that hold the same shard
//!             ::scale(1 / tokens)               the loss is a sum over tokens, divided once
//!             ::norm                            each logical element once, the same on every rank
//!             ::clip                            Megatron's coefficient
//!             Optimizer::step                   the module with its parameters updated
//! ```
//!
//! On GPUs the host waits for none of it: norm and coefficient stay there, and a norm that is not
//! finite is seen when it is read, behind an update that it made do nothing.
//!
//! All of it is in f32 unless told otherwise, and computed in f32 always. Parameters that are narrower
//! ([`Optimizer::cast_params`]) are roundings of f32 masters that the optimizer keeps: an update smaller
//! than the distance of two bf16 numbers would otherwise be lost.
//!
//! Ranks that hold the same shard need not all keep everything: [`Sharding`] says what of optimizer state,
//! gradients and parameters is whose (ZeRO).
//!
//! What an update uses, [`LrSchedule`] and [`WeightDecaySchedule`], are pure functions of the samples
//! trained on. f16 runs scale their loss ([`LossScaler`]).
//!
//! Everything is keyed by a parameter's path and described by its `megaburn_mesh::ShardSpec`.

mod accumulator;
mod clip;
mod device_scalar;
mod error;
mod finite;
mod full_state;
mod grad_zero_count;
mod leaf;
mod loss_scaler;
mod masters;
mod norm;
mod norm_partials;
mod offload;
mod optimizer;
mod overlap;
mod param_grad;
mod plan;
mod reduce;
mod rule;
mod schedule;
mod sharding;
mod state;
mod step;
#[cfg(test)]
mod testing;
mod visit;

pub use accumulator::GradientAccumulator;
pub use device_scalar::DeviceScalar;
pub use error::OptimError;
pub use full_state::{FullState, StateTensor};
pub use loss_scaler::{LossScaleConfig, LossScaler};
pub use norm::GradNorm;
pub use optimizer::{Optimizer, Rates};
pub use rule::{
    AdamWConfig, LionConfig, MuonConfig, MuonScale, MuonTpMode, NewtonSchulz, SgdConfig,
};
pub use schedule::{Decay, LrSchedule, WeightDecaySchedule, WeightDecayStyle, WsdStyle};
pub use sharding::{Sharding, ShardingConfig, ShardingLevel};
pub use state::Moment;
