//! Folders of `torch.distributed.checkpoint` (DCP), which FSDP and torchtitan write.
//!
//! ```text
//! step-100/
//!   .metadata       a pickle: the shapes of all tensors, and where each chunk is
//!   __0_0.distcp    what rank 0 wrote: each chunk as a file of torch.save, one after the other
//!   __1_0.distcp
//! ```

mod dir;
mod metadata;

pub use dir::DcpDir;
pub use metadata::{DcpChunk, DcpTensor};
