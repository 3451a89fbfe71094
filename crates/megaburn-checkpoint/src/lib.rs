//! Checkpoints that are whole or absent, and that any layout can load.
//!
//! ```text
//! checkpoints/
//!   step-00000120/            committed: it has its final name
//!     rank-00000.safetensors  what rank 0 owns, cut along one dimension
//!     rank-00001.safetensors
//!     manifest.json           step, layout, model, trainer state, every tensor's global shape and
//!                             where its pieces are, every file's length and xxh3
//!     manifest.xxh3           the manifest's own xxh3
//!   step-00000130.tmp-…       being written, or left by a crash
//! ```
//!
//! Tensors are stored by global coordinates, each element once; a rank reads the slices that its
//! own [`ShardSpec`](megaburn_mesh::ShardSpec) names, whatever layout wrote them.
//!
//! What holds after a failure while saving:
//!
//! | failure | what the folder holds |
//! |---|---|
//! | an error on any rank (disk full, no permission) | every rank gets an error; the older checkpoints, nothing of the new one |
//! | a panic of a rank | the others get an error within the group's timeout; the older checkpoints |
//! | kill -9 of any rank, at any instant | the older checkpoints, and the new one if it was renamed; leftovers, which [`prepare`] removes |
//! | power loss | the same, as far as the disk obeys fsync |
//!
//! Damage that comes later (a flipped bit, a truncated or lost file) is found by [`find_latest`],
//! which refuses the checkpoint, says so, and takes the previous one.
//!
//! One run writes to a folder at a time, and all ranks see the same folder.

mod agree;
mod checkpoint;
mod dtype;
mod error;
mod folder;
mod latest;
mod manifest;
mod mmap;
mod overlap;
mod save;
mod write;

pub use checkpoint::Checkpoint;
pub use error::CheckpointError;
pub use folder::{clear, prepare};
pub use latest::{Latest, Refused, find_latest};
pub use manifest::{FileInfo, Manifest, PieceInfo, TensorInfo};
pub use save::{NamedTensor, Snapshot, save};
