//! Burn's own optimizers for modules whose parameters are shards.

mod lbfgs;
mod on_shards;
mod reads;
mod sharded;

pub use lbfgs::lbfgs_step;
pub use reads::{Reads, ShardRule};
pub use sharded::ShardedOptimizer;
