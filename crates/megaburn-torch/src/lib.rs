//! PyTorch's checkpoint files, read and written without executing anything.
//!
//! PyTorch stores objects as pickles, which are programs: loading one with Python calls whatever
//! it names. [`Pickle`](pickle::Pickle) reads a pickle as data instead. What Python would call is
//! named in the result and never called.
//!
//! [`PtFile`](pt::PtFile) reads the files of `torch.save`: the values that were saved, and tensors
//! by their names. [`DcpDir`](dcp::DcpDir) reads the folders of `torch.distributed.checkpoint`,
//! under any layout, and [`MegatronDir`](megatron::MegatronDir) those of Megatron-Core. Only the
//! bytes of a tensor that are asked for are read.
//!
//! ```no_run
//! use megaburn_torch::{dcp::DcpDir, pt::PtFile};
//!
//! # fn main() -> Result<(), megaburn_torch::TorchError> {
//! let file = PtFile::open("pytorch_model.bin")?;
//! for (name, tensor) in file.tensors()? {
//!     println!("{name}: {} {:?}", tensor.dtype(), tensor.shape());
//!     let bytes = file.read(&tensor)?;
//! }
//! // The first ten rows, whatever the ranks that wrote them held.
//! let checkpoint = DcpDir::open("outputs/checkpoint/step-1000")?;
//! let rows = checkpoint.read_region("tok_embeddings.weight", &[0, 0], &[10, 4096])?;
//! # Ok(())
//! # }
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod archive;
pub mod dcp;
mod dtype;
mod error;
mod file_range;
pub mod megatron;
pub mod pickle;
pub mod pt;
mod region;
mod strided;

pub use dtype::DType;
pub use error::TorchError;
