//! Checkpoints of Megatron-Core in its format `torch_dist`.
//!
//! ```text
//! checkpoints/
//!   latest_checkpointed_iteration.txt   10
//!   iter_0000010/
//!     metadata.json                     the format
//!     common.pt                         what all ranks have in common: args, iteration, ...
//!     .metadata, __0_0.distcp, ...      tensors and objects, as torch.distributed.checkpoint
//! ```
//!
//! [`MegatronDir`] reads them. To write one, each rank writes with a
//! [`DcpWriter`](crate::dcp::DcpWriter) and [`write_sharded_object`]; one rank then calls
//! [`write_iteration`] and [`write_latest`].
//!
//! The page `docs/megatron-checkpoints.md` has the names and shapes of a model's tensors.

mod buckets;
mod dir;
mod globals;
mod names;
mod optimizer;
mod write;

pub use buckets::OptimizerBucket;
pub use dir::MegatronDir;
pub use globals::check_globals;
pub use names::{ShardedKey, iteration_folder};
pub use optimizer::{OptimizerForm, OptimizerTensor};
pub use write::{write_iteration, write_latest, write_sharded_object};
