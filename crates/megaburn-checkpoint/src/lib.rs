//! Checkpoints that are whole or absent, and that any layout can load.
//!
//! ```text
//! checkpoints/
//!   step-00000120/            committed: it has its final name
//!     rank-00000.safetensors  what rank 0 owns, cut along one dimension
//!     rank-00001.safetensors
//!     manifest.json           step, layout, model, trainer state, every tensor's global shape and
//!                             where its pieces are, every file's length and xxh3, and the xxh3
//!                             of each 64 MiB of a piece
//!     manifest.xxh3           the manifest's own xxh3
//!   step-00000130.tmp-…       being written, or left by a crash
//! ```
//!
//! [`save`] writes one as all ranks of a run, [`save_single`] one as a single process at an exact
//! path; both ask for one tensor's values at a time. Tensors are stored by global coordinates,
//! each element once; a rank reads the slices that its own
//! [`ShardSpec`](megaburn_mesh::ShardSpec) names, whatever layout wrote them, floats cast to the
//! type it wants.
//!
//! Models that others published are read by [`HfDir`], by slice too, and written by [`write_hf`]
//! from any [`TensorSource`]: a published model, a checkpoint, or a checkpoint seen as a published
//! model ([`HfView`]). [`compare`] says where two of them differ.
//!
//! What holds after a failure while saving:
//!
//! | failure | what the folder holds |
//! |---|---|
//! | an error on any rank (disk full, no permission) | every rank gets an error; the older checkpoints, nothing of the new one |
//! | a panic of a rank | the others get an error within the group's timeout; the older checkpoints |
//! | kill -9 of any rank, at any instant | the older checkpoints, and the new one if it was renamed; leftovers, which [`prepare`] knows by their name and by the mark in them, and removes |
//! | any of these in [`save_single`] and [`write_hf`] | what stood at the path before, whole, or the new one, whole; only kill -9 leaves `PATH.tmp-…`, which the next one to the same path removes. A replaced folder and the new one change names in one step; on file systems that cannot do that, kill -9 between two renames leaves the old one as `PATH.replaced-…`, and the next one to the same path puts it back |
//! | the folder above cannot be synced after the rename | the new checkpoint, whole; the error says that a power loss may undo it |
//! | a rank of another host times out while others write | rank 0 removes the unfinished folder; what others still write into it may stay as `step-….tmp-…`, which [`prepare`] removes at the next start |
//! | power loss | the same, as far as the disk obeys fsync |
//!
//! Damage that comes later (a flipped bit, a truncated or lost file) is found by [`find_latest`] and
//! [`newest_valid`], which refuse the checkpoint, say so, and take the previous one. An error that is
//! not damage (no permission, no file descriptors, a network file system that is away) is tried again
//! and then ends the search: an older checkpoint is never used because of it.
//! A run sets the refused one aside as `step-XXXXXXXX.damaged-…` ([`set_aside_damaged`]). Before [`save`] deletes an
//! old checkpoint, it reads those that stay and were not read before: a damaged one does not count as one that is
//! kept, and is not deleted. Nor is one that another run or a conversion wrote.
//!
//! What a rank reads of a tensor is compared with the manifest's hashes once more while it is read: a
//! disk or a server that gives other bytes the second time is an error that names the tensor, the file
//! and the chunk. Files are read, not mapped into memory: an I/O error, or a file that shrinks, is an
//! error that names the file.
//!
//! Nothing is replaced at an exact path unless that is asked for, and only what is of the same kind.
//!
//! One run writes to a folder at a time, and all ranks see the same folder.

mod agree;
mod atomic;
mod atomic_dir;
mod buffer;
mod cast;
mod checkpoint;
mod chunks;
mod compare;
mod dtype;
mod error;
mod fault;
mod folder;
pub mod hf;
mod intersect;
mod latest;
mod manifest;
mod owner;
mod paths;
mod pieces;
mod plain;
mod retention;
mod runs;
mod safetensors_file;
mod save;
mod single;
mod sizes;
mod source;
mod sweep;
mod target;
mod tensor_file;
#[cfg(test)]
mod testing;
mod transpose;
mod unfinished;
mod write;

pub use atomic::write_atomic;
pub use checkpoint::Checkpoint;
pub use compare::{Comparison, TensorComparison, ValueDifference, compare};
pub use error::CheckpointError;
pub use fault::{may_pass, retried, retried_where};
pub use folder::{checkpoint_step, checkpoints_of, move_checkpoints, prepare, set_aside_damaged};
pub use hf::{HfDir, HfEntry, HfView, HfWriteOptions, HfWritten, write_hf};
pub use latest::{Latest, Refused, find_latest, newest, newest_valid};
pub use manifest::{FileInfo, Manifest, PieceInfo, TensorInfo};
pub use paths::{REPLACED, TMP, is_there, leftover_of, sibling_path, sync_folder};
pub use save::{Guard, LazyData, NamedTensor, Snapshot, is_written_by, save};
pub use single::save_single;
pub use source::{TensorHeader, TensorSource};
pub use tensor_file::TensorFile;
pub use unfinished::remove_unfinished;
