//! Indices of samples: arrays of numbers that are built once, by one process of a host, and kept in
//! a folder as `.npy` files. Their entries are read on demand.

mod event;
mod files;
mod memory;
mod npy;

pub use event::IndexEvent;
pub(crate) use files::IndexFiles;
pub(crate) use memory::reserved;
pub(crate) use npy::{NpyFile, NpyShape, NpyType, NpyWriter};
