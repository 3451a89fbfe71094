//! What a cube of a grouped product works on.

/// Rows of the result that a cube has: 64 for each four planes, which multiply together.
pub(super) const ROWS: usize = 128;
/// Terms of a sum that are in shared memory together: a panel of 64 elements, 128 bytes.
pub(super) const TERMS: usize = 64;
/// Units of a cube.
pub(super) const UNITS: usize = 256;
/// Bytes of an element.
const ELEMENT: usize = 2;
/// Bytes that a unit copies at a time, of a row of eight elements.
pub(super) const CHUNK: usize = 16;

/// What follows what in memory.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) enum Major {
    /// The terms of a sum, as in `x` for `x w`.
    Terms,
    /// What sums are different for, as in `w` for `x w`.
    Lines,
}

/// One of the two operands, as far as it is in shared memory.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Side {
    /// Rows of a left operand, columns of a right one.
    pub(super) lines: usize,
    pub(super) major: Major,
}

impl Side {
    /// Bytes of a step's part.
    pub(super) fn bytes(self) -> usize {
        self.lines * TERMS * ELEMENT
    }

    /// Chunks that a unit copies of each step.
    pub(super) fn pieces(self) -> usize {
        self.bytes() / CHUNK / UNITS
    }

    /// Chunks of what lies in a row: of terms, or of lines.
    pub(super) fn chunks(self) -> usize {
        let elements = if self.major == Major::Terms {
            TERMS
        } else {
            self.lines
        };
        elements * ELEMENT / CHUNK
    }

    /// Rows from a piece of a unit to its next.
    pub(super) fn rows_between_pieces(self) -> usize {
        UNITS / self.chunks()
    }

    /// Bytes from a piece to the next in shared memory.
    pub(super) fn between_pieces(self) -> usize {
        self.rows_between_pieces() * TERMS * ELEMENT
    }

    /// Rows of a panel, whose rows have 128 bytes.
    pub(super) fn panel_rows(self) -> usize {
        if self.major == Major::Terms {
            self.lines
        } else {
            TERMS
        }
    }
}

/// The shape of the work of a cube.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(super) struct Shape {
    /// Columns of the result.
    pub(super) columns: usize,
    pub(super) left: Major,
    pub(super) right: Major,
    /// Steps whose parts have room in shared memory together.
    pub(super) stages: usize,
    /// As PTX names it.
    pub(super) dtype: &'static str,
}

impl Shape {
    pub(super) fn left(&self) -> Side {
        Side {
            lines: ROWS,
            major: self.left,
        }
    }

    pub(super) fn right(&self) -> Side {
        Side {
            lines: self.columns,
            major: self.right,
        }
    }

    /// Bytes of a step's parts.
    pub(super) fn stage(&self) -> usize {
        self.left().bytes() + self.right().bytes()
    }

    /// Bytes of shared memory.
    pub(super) fn shared(&self) -> usize {
        self.stages * self.stage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each chunk of a step's part is one unit's, and all of a unit's are as far apart.
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
