//! Checkpoints in a folder of each host.
//!
//! A host's folder has the files of its own ranks, copies of the files of the hosts before it, and
//! the manifest of all files. So a checkpoint is complete while each file is on some host. What the
//! ranks of a host read of other files is fetched at a start, chunk by chunk.

pub(crate) mod check;
pub(crate) mod examine;
mod fetch;
pub(crate) mod judge;
pub(crate) mod latest;
pub(crate) mod map;
mod pairs;
mod parts;
mod plan;
pub(crate) mod promote;
pub(crate) mod replicate;
mod stream;
pub(crate) mod transfer;
