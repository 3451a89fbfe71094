//! Folders of `torch.distributed.checkpoint` (DCP), which FSDP and torchtitan write.
//!
//! ```text
//! step-100/
//!   .metadata       a pickle: the shapes of all tensors, and where each chunk is
//!   __0_0.distcp    what rank 0 wrote: each chunk as a file of torch.save, one after the other
//!   __1_0.distcp
//! ```
//!
//! [`DcpDir`] reads any region of a tensor. [`DcpWriter`] writes what one rank holds, and
//! [`write_metadata`] the metadata from the [records](DcpRecord) of all ranks.

mod dir;
mod metadata;
mod record;
mod write;
mod write_metadata;

pub use dir::DcpDir;
pub use metadata::{DcpChunk, DcpTensor};
pub use record::DcpRecord;
pub use write::DcpWriter;
pub(crate) use write::{create_error, write_error};
pub use write_metadata::write_metadata;
