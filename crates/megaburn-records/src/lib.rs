//! Records and files of full modules, read into shards and written from them.
//!
//! A file that Burn wrote of a plain module (`nn::Linear`, `nn::Embedding`) has the names and
//! shapes of the same module with parallel layers. [`RecordFile`] reads such a file into the
//! shards of any number of ranks, and writes one from shards; [`load_from`] takes any store of
//! `burn-store`, e.g. one that renames tensors, and [`load_record`] and [`full_record`] Burn's
//! `ModuleRecord`.
//!
//! | file | read | written | layout |
//! |---|---|---|---|
//! | `.bpk` (burnpack) | yes | yes | Burn's |
//! | `.safetensors` | yes | yes | Burn's, or PyTorch's by [`RecordFile::with_layout`] |
//! | `.pt`, `.pth`, `.bin` (PyTorch) | yes | no | PyTorch's |
//! | `.mpk` (recorders up to Burn 0.21) | no | no | Burn 0.22 cannot read them either |
//!
//! Values are moved bit for bit. Burn's own `into_record` and the stores of `burn-store` refuse to
//! save a rank's shard as if it were the module: they panic with a message that names this crate.
//!
//! ```
//! use burn::{module::Module, prelude::Device, tensor::Tensor};
//! use megaburn_collective::{GroupOptions, run_threads};
//! use megaburn_parallel::{ParallelLinear, ParallelLinearConfig, Sharded};
//! use megaburn_records::{RecordFile, RecordsError};
//!
//! #[derive(Module, Sharded, Debug)]
//! struct Net {
//!     up: ParallelLinear,
//! }
//!
//! let folder = tempfile::tempdir()?;
//! let file = folder.path().join("net.bpk");
//! let ranks = run_threads(2, GroupOptions::default(), |group| {
//!     let up = ParallelLinearConfig::column(8, 32).with_name("up");
//!     let net = Net { up: up.init(&group, &Device::flex())? };
//!     RecordFile::new(&file).save(&net, &group)?; // the full [8, 32], on rank 0
//!     let net = RecordFile::new(&file).load(net)?; // [8, 16] on each rank
//!     Ok::<_, RecordsError>(net.up.weight.dims())
//! });
//! assert!(ranks.into_iter().all(|dims| dims.unwrap() == [8, 16]));
//! # Ok::<(), std::io::Error>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod error;
mod file;
mod full;
mod layout;
mod load;
mod part;
mod save;
mod targets;

pub use error::RecordsError;
pub use file::RecordFile;
pub use layout::Layout;
pub use load::{load_from, load_from_ignoring, load_record};
pub use save::full_record;
