//! The tile shapes of a grouped GEMM.

/// Result rows per cube: 64 for each warpgroup (four planes that multiply together).
pub(in crate::linear::grouped) const ROWS: usize = 128;
/// Terms (K elements) per stage: a panel of 64 elements, 128 bytes.
pub(in crate::linear::grouped) const TERMS: usize = 64;
/// Units per cube.
pub(in crate::linear::grouped) const UNITS: usize = 256;
/// Bytes of an element.
const ELEMENT: usize = 2;
/// Bytes that a unit copies at a time: eight elements of a row.
pub(in crate::linear::grouped) const CHUNK: usize = 16;

/// Which dimension of an operand is contiguous in memory.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::linear::grouped) enum Major {
    /// The terms of a sum (K), as in `x` of `x w`.
    Terms,
    /// The dimension of the result (M or N), as in `w` of `x w`.
    Lines,
}

/// The tile of one of the two operands in shared memory.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::linear::grouped) struct Side {
    /// Rows of the left operand, columns of the right one.
    pub(in crate::linear::grouped) lines: usize,
    pub(in crate::linear::grouped) major: Major,
}

impl Side {
    /// Bytes of the tile in one stage.
    pub(in crate::linear::grouped) fn bytes(self) -> usize {
        self.lines * TERMS * ELEMENT
    }

    /// Chunks that a unit copies per stage.
    pub(in crate::linear::grouped) fn pieces(self) -> usize {
        self.bytes() / CHUNK / UNITS
    }

    /// Chunks per row of the tile: of terms, or of lines.
    pub(in crate::linear::grouped) fn chunks(self) -> usize {
        let elements = if self.major == Major::Terms {
            TERMS
        } else {
            self.lines
        };
        elements * ELEMENT / CHUNK
    }

    /// Distance in rows from one chunk of a unit to its next.
    pub(in crate::linear::grouped) fn rows_between_pieces(self) -> usize {
        UNITS / self.chunks()
    }

    /// Distance in bytes from one chunk of a unit to its next in shared memory.
    pub(in crate::linear::grouped) fn between_pieces(self) -> usize {
        self.rows_between_pieces() * TERMS * ELEMENT
    }

    /// Rows of a panel; each has 128 bytes.
    pub(in crate::linear::grouped) fn panel_rows(self) -> usize {
        if self.major == Major::Terms {
            self.lines
        } else {
            TERMS
        }
    }
}

/// The tile shape of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(in crate::linear::grouped) struct Shape {
    /// Columns of the result.
    pub(in crate::linear::grouped) columns: usize,
    pub(in crate::linear::grouped) left: Major,
    pub(in crate::linear::grouped) right: Major,
    /// The number of stages: steps whose operands fit in shared memory together.
    pub(in crate::linear::grouped) stages: usize,
    /// The dtype as PTX names it.
    pub(in crate::linear::grouped) dtype: &'static str,
}

impl Shape {
    pub(in crate::linear::grouped) fn left(&self) -> Side {
        Side {
            lines: ROWS,
            major: self.left,
        }
    }

    pub(in crate::linear::grouped) fn right(&self) -> Side {
        Side {
            lines: self.columns,
            major: self.right,
        }
    }

    /// Bytes of one stage: the tiles of both operands.
    pub(in crate::linear::grouped) fn stage(&self) -> usize {
        self.left().bytes() + self.right().bytes()
    }

    /// Bytes of shared memory.
    pub(in crate::linear::grouped) fn shared(&self) -> usize {
        self.stages * self.stage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each chunk of a tile is copied by exactly one unit, and the chunks of a unit are equally
    /// spaced.
    #[test]
    fn units_copy_all_of_a_part() {
        for (lines, major) in [128, 256]
            .into_iter()
            .flat_map(|n| [(n, Major::Terms), (n, Major::Lines)])
        {
            let side = Side { lines, major };
            let place = |unit: usize, piece: usize| {
                let chunk = unit % side.chunks();
                let row = unit / side.chunks();
                let in_panel = row * TERMS * ELEMENT + ((chunk % 8) ^ (row % 8)) * CHUNK;
                let panel = chunk / 8 * side.panel_rows() * TERMS * ELEMENT;
                panel + in_panel + piece * side.between_pieces()
            };
            let units = 0..UNITS;
            let all = units.flat_map(|unit| (0..side.pieces()).map(move |piece| (unit, piece)));
            let mut places: Vec<usize> = all.map(|(unit, piece)| place(unit, piece)).collect();
            places.sort_unstable();
            let expected: Vec<usize> = (0..side.bytes()).step_by(CHUNK).collect();
            assert_eq!(places, expected, "{side:?}");
        }
    }
}
