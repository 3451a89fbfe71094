//! Helpers of the kernels: the layout of rows in memory, the units that work on them, sums over
//! rows, largest magnitudes, and random numbers.
//!
//! In CubeCL's terms a unit is a thread, a plane is a warp, and a cube is a block.

mod amax;
pub(crate) mod assembly;
mod kernels;
mod launch;
mod philox;
mod reduce;
mod row_group;
mod rows;
pub(crate) mod tensor_cores;
mod tensors;

pub(crate) use amax::{magnitude, raise};
pub(crate) use launch::{put_parts, sum_parts};
pub(crate) use philox::{RandomStream, random_bits, unit};
pub(crate) use reduce::{row_sum, row_sums};
pub(crate) use row_group::{RowGroup, unit_and_row};
pub(crate) use rows::{RowView, address_type, lanes};
pub(crate) use tensors::{on_gpu, wrap};

/// Units of a plane.
pub(crate) const PLANE: u32 = 32;
