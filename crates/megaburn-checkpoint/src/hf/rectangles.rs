//! Copies the rectangles that a published tensor and a rank's shard of its parameter share.

use std::ops::Range;

use megaburn_mesh::{ShardPiece, ShardSpec};

use crate::{
    error::CheckpointError,
    runs::{GAP, Runs, Stored},
    source::TensorHeader,
    transpose::{MatrixBlock, MatrixCopy},
};

/// Bytes of a transposed tensor that are read at once: about the size of a core's L2 cache, but at
/// least `LINES` lines, up to `LARGEST_BAND`. Wide bands matter because each jump to another page
/// of the result should copy more than a few elements.
const BAND: usize = 2 << 20;
const LINES: usize = 256;
const LARGEST_BAND: usize = 16 << 20;

/// A tensor of the folder, or consecutive columns of it, that is a part of a parameter.
pub(super) struct HfPartReader<'a> {
    pub(super) header: TensorHeader,
    pub(super) stored: Stored<'a>,
    /// The columns of the tensor.
    pub(super) width: usize,
    /// The first of the tensor's columns that belong to the part.
    pub(super) start: usize,
    /// The range of the parameter's last dimension that it fills.
    pub(super) columns: Range<usize>,
}

/// A rectangle of a matrix: its position in the stored tensor and in the result, and its rows and
/// columns in the result.
struct Rectangle {
    from: MatrixBlock,
    to: MatrixBlock,
    size: (usize, usize),
}

/// A tensor with any number of dimensions, viewed as consecutive matrices, and how a rank shards
/// it.
pub(super) struct Matrices {
    outer: Vec<usize>,
    rows: usize,
    cols: usize,
    dim: usize,
    local_len: usize,
}

impl Matrices {
    pub(super) fn of(spec: &ShardSpec) -> Self {
        // A vector is a matrix of one row, a scalar a vector of one element.
        let missing = 2usize.saturating_sub(spec.global_shape.len());
        let shape = [&vec![1; missing], spec.global_shape.as_slice()].concat();
        let (outer, matrix) = shape.split_at(shape.len() - 2);
        let dim = spec.dim + missing.min(1);
        let rows = matrix[0];
        let cols = matrix[1];
        Self {
            outer: outer.to_vec(),
            rows,
            cols,
            dim,
            local_len: spec.local_len,
        }
    }

    /// Reads the intersection of a part and a rank's pieces.
    pub(super) fn read(
        &self,
        copy: &MatrixCopy,
        part: &HfPartReader<'_>,
        pieces: &[ShardPiece],
        transposed: bool,
        local: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let mut runs = Runs::new(&part.stored, None);
        for piece in pieces {
            for Rectangle {
                from,
                to,
                size: (rows, cols),
            } in self.shared(part, piece, transposed)
            {
                if transposed {
                    read_transposed(copy, part.stored, (from, to), (rows, cols), local)?;
                } else if from.stride == cols && to.stride == cols {
                    runs.push(from.start, to.start, rows * cols);
                } else {
                    let row = |row| (from.start + row * from.stride, to.start + row * to.stride);
                    (0..rows)
                        .map(row)
                        .for_each(|(from, to)| runs.push(from, to, cols));
                }
            }
        }
        runs.read(part.stored, None, |bytes, to| copy.run(bytes, local, to))
    }

    /// The rectangles in which a part and a rank's piece intersect, one per matrix.
    fn shared(
        &self,
        part: &HfPartReader<'_>,
        piece: &ShardPiece,
        transposed: bool,
    ) -> Vec<Rectangle> {
        let Self {
            rows,
            cols,
            local_len,
            ..
        } = *self;
        let num_outer = self.outer.len();
        // The range of a dimension that the piece holds, and the length of that dimension in the
        // local tensor.
        let held = |dim: usize, len: usize| {
            if dim == self.dim {
                (piece.global.clone(), local_len)
            } else {
                (0..len, len)
            }
        };
        let to_local = |dim: usize, at: usize| {
            if dim == self.dim {
                at - piece.global.start + piece.local.start
            } else {
                at
            }
        };
        let (row_range, local_rows) = held(num_outer, rows);
        let (col_range, local_cols) = held(num_outer + 1, cols);
        let width = part.width;
        let start = col_range.start.max(part.columns.start);
        let col_range = start..col_range.end.min(part.columns.end).max(start);
        if row_range.is_empty() || col_range.is_empty() {
            return Vec::new();
        }
        let row = row_range.start;
        let col = part.start + col_range.start - part.columns.start;
        let to_row = to_local(num_outer, row);
        let to_col = to_local(num_outer + 1, col_range.start);
        let size = (row_range.len(), col_range.len());
        let rectangle = |(from, to): (usize, usize)| {
            let base = to * local_rows * local_cols;
            let matrix = from * rows * width;
            let to = MatrixBlock {
                start: base + to_row * local_cols + to_col,
                stride: local_cols,
            };
            let from = if transposed {
                MatrixBlock {
                    start: matrix + col * rows + row,
                    stride: rows,
                }
            } else {
                MatrixBlock {
                    start: matrix + row * width + col,
                    stride: width,
                }
            };
            Rectangle { from, to, size }
        };
        self.outer_pairs(piece).into_iter().map(rectangle).collect()
    }

    /// For each matrix of which the piece holds something, its index in the global and in the local
    /// tensor.
    fn outer_pairs(&self, piece: &ShardPiece) -> Vec<(usize, usize)> {
        let Some(&len) = self.outer.get(self.dim) else {
            return (0..self.outer.iter().product()).map(|i| (i, i)).collect();
        };
        let before: usize = self.outer[..self.dim].iter().product();
        let after: usize = self.outer[self.dim + 1..].iter().product();
        let mut pairs = Vec::new();
        for b in 0..before {
            for (from, to) in piece.global.clone().zip(piece.local.clone()) {
                let from = b * len + from;
                let to = b * self.local_len + to;
                pairs.extend((0..after).map(|a| (from * after + a, to * after + a)));
            }
        }
        pairs
    }
}

/// Reads `rows` rows of `cols` elements of the result from a source of `cols` lines of `rows`
/// elements, one band of lines at a time.
fn read_transposed(
    copy: &MatrixCopy,
    stored: Stored<'_>,
    (from, to): (MatrixBlock, MatrixBlock),
    (rows, cols): (usize, usize),
    local: &mut [u8],
) -> Result<(), CheckpointError> {
    let size = stored.size;
    // Lines that are close together are read in one go, including the gaps.
    let is_near = (from.stride - rows) * size <= GAP;
    let stride = if is_near { from.stride } else { rows };
    let line = stride * size;
    let lines = (BAND / line)
        .max(LINES.min(LARGEST_BAND / line))
        .clamp(1, cols);
    let mut buffer = vec![0; (lines - 1) * line + rows * size];
    for first in (0..cols).step_by(lines) {
        let lines = lines.min(cols - first);
        let at = |line: usize| stored.start + ((from.start + line * from.stride) * size) as u64;
        let buffer = &mut buffer[..(lines - 1) * line + rows * size];
        if is_near {
            stored.file.read_at(buffer, at(first))?
        } else {
            for (number, line) in buffer.chunks_mut(line).enumerate() {
                stored.file.read_at(line, at(first + number))?;
            }
        }
        let to = MatrixBlock {
            start: to.start + first,
            stride: to.stride,
        };
        copy.transposed(
            (buffer, MatrixBlock { start: 0, stride }),
            (local, to),
            (rows, lines),
        );
    }
    Ok(())
}
