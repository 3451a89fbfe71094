use cubecl::prelude::*;

use super::PLANE;

/// The units that work on a row together; a compile-time constant of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowGroup {
    /// Planes that share a row.
    pub(crate) planes: u32,
    /// Rows that a cube works on at a time: one, or one per plane.
    pub(crate) rows: u32,
    /// Vectors that each unit holds in registers, or 0 if a row is too long for that.
    pub(crate) vecs_per_thread: u32,
}

/// Planes of a cube in which each plane has its own row.
const SINGLES: u32 = 8;

impl RowGroup {
    /// Chooses the units for rows of `vectors` vectors: adds units, up to `max_units`, until each
    /// has at most `target_vecs` vectors. With more than `max_vecs` vectors each, they are not held
    /// in registers.
    pub(crate) fn new(vectors: usize, max_units: u32, target_vecs: usize, max_vecs: usize) -> Self {
        let mut units = PLANE;
        while units < max_units && vectors > units as usize * target_vecs {
            units *= 2;
        }
        let vecs_per_thread = vectors.div_ceil(units as usize);
        let vecs_per_thread = if vecs_per_thread > max_vecs {
            0
        } else {
            vecs_per_thread as u32
        };
        let planes = units / PLANE;
        Self {
            planes,
            rows: if planes == 1 { SINGLES } else { 1 },
            vecs_per_thread,
        }
    }

    pub(crate) fn cube_dim(self) -> CubeDim {
        CubeDim::new_2d(PLANE, self.planes * self.rows)
    }

    /// The number of cubes that cover `rows` rows.
    pub(crate) fn cubes(self, rows: usize) -> u32 {
        rows.div_ceil(self.rows as usize) as u32
    }
}

/// The unit's index in its group, and the group's index among the groups of all cubes.
#[cube]
pub(crate) fn unit_and_row(#[comptime] group: RowGroup) -> (u32, u32) {
    if comptime!(group.planes == 1) {
        (UNIT_POS_X, CUBE_POS_X * comptime!(group.rows) + UNIT_POS_Y)
    } else {
        (UNIT_POS, CUBE_POS_X)
    }
}
