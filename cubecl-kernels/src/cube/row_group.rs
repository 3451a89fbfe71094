use cubecl::prelude::*;

use super::PLANE;

/// The units that work on a row together, known when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowGroup {
    /// Planes that share a row.
    pub(crate) planes: u32,
    /// Rows of a cube at a time: one, or as many as it has planes.
    pub(crate) rows: u32,
    /// Vectors that each unit holds in registers, or 0 where a row is too long for that.
    pub(crate) vecs_per_thread: u32,
}

/// Planes of a cube whose planes have a row each.
const SINGLES: u32 = 8;

impl RowGroup {
    /// For rows of `vectors`, of which a unit holds `few` while there are units, and `most` at most.
    pub(crate) fn new(vectors: usize, max_units: u32, few: usize, most: usize) -> Self {
        let mut units = PLANE;
        while units < max_units && vectors > units as usize * few {
            units *= 2;
        }
        let vecs_per_thread = vectors.div_ceil(units as usize);
        let vecs_per_thread = if vecs_per_thread > most {
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

    /// Cubes that have a row for each team.
    pub(crate) fn cubes(self, rows: usize) -> u32 {
        rows.div_ceil(self.rows as usize) as u32
    }
}

/// The unit's place in its team and the team's place among all teams.
#[cube]
pub(crate) fn place(#[comptime] team: RowGroup) -> (u32, u32) {
    if comptime!(team.planes == 1) {
        (UNIT_POS_X, CUBE_POS_X * comptime!(team.rows) + UNIT_POS_Y)
    } else {
        (UNIT_POS, CUBE_POS_X)
    }
}
