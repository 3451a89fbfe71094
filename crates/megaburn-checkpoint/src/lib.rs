//! Checkpoints that are written atomically and that any layout can load.
//!
//! ```text
//! checkpoints/
//!   step-00000120/            committed: it has its final name
//!     rank-00000.safetensors  rank 0's share: slices of tensors, or ranges of their elements
//!     rank-00001.safetensors
//!     manifest.json           step, layout, model, trainer state, every tensor's global shape and
//!                             where its pieces are, every file's length and xxh3, and the xxh3
//!                             of each 64 MiB of a piece
//!     manifest.xxh3           the manifest's own xxh3
//!   step-00000130.tmp-…       being written, or left by a crash
//! ```
//!
//! [`save`] writes a checkpoint from all ranks of a run; [`save_single`] writes one from a single
//! process to a given path. Both request one tensor's values at a time. Tensors are stored by
//! global coordinates, each element once. A rank reads the slices that its own
//! [`ShardSpec`](megaburn_mesh::ShardSpec) selects, whatever layout wrote them, with floats cast to
//! the requested type.
//!
//! [`HfDir`] reads published models by slice, from safetensors files or PyTorch's own. [`write_hf`]
//! writes one from any [`TensorSource`]: a published model, a checkpoint, or a checkpoint viewed as
//! a published model ([`HfView`]). [`compare`] finds the differences between two sources.
//!
//! Guarantees after a failure while saving:
//!
//! | failure | what the folder holds |
//! |---|---|
//! | an error on any rank (disk full, no permission) | the older checkpoints and nothing of the new one; every rank gets an error |
//! | a panic of a rank | the older checkpoints; the other ranks get an error within the group's timeout |
//! | kill -9 of any rank, at any instant | the older checkpoints, and the new one if it was renamed; leftovers, which [`prepare`] recognizes by their name and mark, and removes |
//! | any of these in [`save_single`] and [`write_hf`] | at the path, either the old contents or the new ones, complete; only kill -9 leaves `PATH.tmp-…`, which the next write to the same path removes. A replaced folder and the new one are exchanged in one step; on file systems that cannot do that, kill -9 between two renames leaves the old one as `PATH.replaced-…`, and the next write to the same path restores it |
//! | the parent folder cannot be synced after the rename | the new checkpoint, complete; the error says that a power loss may undo it |
//! | a rank on another host times out while others write | rank 0 removes the unfinished folder; what others still write into it may remain as `step-….tmp-…`, which [`prepare`] removes at the next start |
//! | power loss | the same, as far as the disk obeys fsync |
//!
//! [`find_latest`] and [`newest_valid`] detect later damage (a flipped bit, a truncated or lost
//! file). They refuse the checkpoint, log a warning, and take the previous one. An error that is
//! not damage (no permission, no file descriptors, an unavailable network file system) is retried
//! and then ends the search: it never causes an older checkpoint to be used.
//!
//! A run renames a refused checkpoint to `step-XXXXXXXX.damaged-…` ([`set_aside_damaged`]). Before
//! [`save`] deletes an old checkpoint, it verifies the remaining ones that have not been read yet.
//! A damaged one does not count towards the number to keep and is not deleted, and neither is one
//! that another run or a conversion wrote. A run that finds that the memory of a rank failed renames
//! the checkpoints which may hold wrong values ([`set_aside_suspect`]).
//!
//! When a rank reads a tensor, the bytes are checked against the manifest's hashes a second time.
//! If a disk or server returns different bytes the second time, the error names the tensor, the
//! file and the chunk. Files are read, not memory-mapped, so an I/O error or a shrinking file is an
//! error that names the file.
//!
//! At an exact path nothing is replaced unless requested, and only by something of the same kind.
//!
//! A [`CheckpointStore`] holds checkpoints in an object store, where they are complete or absent too.
//! A [`CheckpointUpload`] uploads one from all ranks while the program computes.
//!
//! Only one run at a time may write to a folder. All ranks must see the same folder, unless each host has
//! one of its own ([`Place`]).

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod agree;
mod async_save;
mod atomic_dir;
mod atomic_file;
mod average;
mod background;
mod buffer;
mod cast;
mod checkpoint;
mod chunks;
mod compare;
mod dtype;
mod error;
mod examine;
mod fault;
mod fetched;
mod find;
mod folder;
mod hex;
pub mod hf;
mod hosts;
mod intersect;
mod inventory;
mod latest;
mod manifest;
mod named_tensor;
mod needed;
mod object_store;
mod open_file;
mod owner;
mod paths;
mod piece_index;
mod pieces;
mod place;
mod plain;
mod prepare;
mod prune;
mod remove;
mod report;
mod retention;
mod runs;
mod safetensors_file;
mod save;
mod save_at;
mod save_source;
mod save_stage;
mod selection;
mod share;
mod single;
mod sizes;
mod snapshot;
mod source;
mod statistics;
mod sweep;
mod target;
mod tensor_bytes;
mod tensor_file;
#[cfg(test)]
mod testing;
mod transpose;
mod unfinished;
mod unfinished_checkpoint;
mod values;
mod verification;
mod verified;
mod write;
mod write_folder;
mod write_plan;

pub use async_save::{Advance, AsyncSave, SharedGuard};
pub use atomic_file::write_atomic;
pub use average::Average;
pub use background::Background;
pub use checkpoint::Checkpoint;
pub use compare::{
    Comparison, TensorComparison, Tolerance, ValueDifference, compare, compare_within,
};
pub use error::CheckpointError;
pub use examine::{Damage, Examined, bytes_to_examine, examine};
pub use fault::{may_pass, retried, retried_where};
pub use find::find_latest;
pub use folder::{
    checkpoint_path, checkpoint_step, checkpoints_of, move_checkpoints, set_aside_damaged,
    set_aside_suspect,
};
pub use hf::{HfDir, HfEntry, HfTensor, HfView, HfWriteOptions, HfWritten, write_hf};
pub use hosts::{check::check_folders, map::Hosts};
pub use inventory::{CheckpointState, ListedCheckpoint, list_checkpoint, list_checkpoints};
pub use latest::{Latest, Refused, newest, newest_valid};
pub use manifest::{FileInfo, Manifest, PieceInfo, TensorInfo};
pub use named_tensor::{NamedTensor, PendingValues, Values};
pub use needed::NeededChunks;
pub use object_store::{
    CheckpointStore, CheckpointUpload, OpenedCheckpoint, StoreWriter, StoredCheckpoint, UploadStage,
};
pub use paths::{REPLACED, TMP, is_there, leftover_of, sibling_path, sync_folder};
pub use place::Place;
pub use prepare::prepare;
pub use prune::{PrunePlan, plan_prune};
pub use retention::Retention;
pub use save::save;
pub use save_at::save_at;
pub use save_source::save_source;
pub use selection::Selection;
pub use single::save_single;
pub use snapshot::Snapshot;
pub use source::{TensorHeader, TensorSource};
pub use statistics::{TensorStatistics, statistics};
pub use tensor_bytes::TensorBytes;
pub use tensor_file::TensorFile;
pub use unfinished::remove_unfinished;
pub use unfinished_checkpoint::Guard;
pub use write_folder::write_folder;
pub use write_plan::{Copies, HeldTensor, WritePlan};
