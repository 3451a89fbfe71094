//! Checkpoints in object stores.
//!
//! ```text
//! s3://bucket/run/
//!   run-1d4d2398….start       the token of the newest start of the run; other starts stop
//!   step-00000300/
//!     run-1d4d2398….owner     the mark: which run writes this folder, and the token of its
//!                             start; the first object and the last one that is deleted
//!     rank-00000.safetensors  the objects of the ranks
//!     manifest.xxh3
//!     manifest.json           the last object, which makes the checkpoint complete, and the first
//!                             one that is deleted
//! ```
//!
//! A checkpoint is complete or absent: only a folder with a manifest is one. What a killed upload or
//! deletion leaves is a folder with a mark and without a manifest, which the next start of the same
//! run removes. Only the names above are removed, and only in a folder with the run's mark.

mod download;
mod file_names;
mod opened;
mod store;
mod stored;
mod upload;
mod writer;

pub use opened::OpenedCheckpoint;
pub use store::CheckpointStore;
pub use stored::StoredCheckpoint;
pub use upload::{CheckpointUpload, UploadStage};
pub use writer::StoreWriter;
