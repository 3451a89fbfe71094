//! What the kernels share: how rows lie in memory, who works on them, sums over them, and random
//! numbers.

pub(crate) mod assembly;
mod parts;
mod philox;
mod reduce;
mod rows;
mod team;
pub(crate) mod tensor_cores;
mod tensors;

pub(crate) use parts::{put_parts, sum_parts};
pub(crate) use philox::{RandomStream, random_bits, unit};
pub(crate) use reduce::{row_sum, row_sums};
pub(crate) use rows::{Rows, address_type, lanes};
pub(crate) use team::{Team, place};
pub(crate) use tensors::{on_gpu, wrap};

/// Units of a plane.
pub(crate) const PLANE: u32 = 32;
