//! What the kernels of rows share: how rows lie in memory, who works on them, and sums over them.

mod parts;
mod reduce;
mod rows;
mod team;

pub(crate) use parts::sum_parts;
pub(crate) use reduce::{row_sum, row_sums};
pub(crate) use rows::{Rows, address_type, lanes};
pub(crate) use team::{Team, place};

/// Units of a plane.
pub(crate) const PLANE: u32 = 32;
