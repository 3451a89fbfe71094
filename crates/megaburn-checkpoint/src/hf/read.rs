use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::{ShardPiece, ShardSpec};

use super::HfDir;
use crate::{
    CheckpointError, TensorHeader,
    buffer::filled,
    runs::{GAP, Runs, Stored},
    transpose::{MatrixBlock, MatrixCopy},
};

/// Bytes of a transposed tensor that are read at once: about as many as a core's second cache has,
/// but `LINES` lines if they are not too long, as a jump to another page of the result for each few
/// elements is what costs.
const BAND: usize = 2 << 20;
const LINES: usize = 256;
const LARGEST_BAND: usize = 16 << 20;

/// A tensor of the folder that is a part of a parameter.
struct HfPartReader<'a> {
    header: TensorHeader,
    stored: Stored<'a>,
    /// Which part of the parameter's last dim it is.
    columns: Range<usize>,
}

impl HfDir {
    /// A rank's local values of the parameter that the tensors `names` make up, side by side along
    /// its last dim; each is stored with the last two dims swapped if `transposed` (published
    /// linear weights are `[out, in]`, those of megaburn `[in, out]`). Vectors and scalars are never
    /// transposed.
    ///
    /// Only what `spec` names is read from the files, with small gaps between: a block of 1 MiB is in
    /// memory beside the result, of a transposed tensor one of 16 MiB or one line. Floats become `dtype`,
    /// each rounded to the nearest; without one the files' type stays.
    ///
    /// # Shapes
    /// `spec.local_shape()`, padding zero.
    /// # Errors
    /// A missing tensor (the nearest name is given), a shape that does not make up
    /// `spec.global_shape`, several element types and no `dtype`, a type that does not become `dtype`.
    /// # Panics
    /// Without names.
    pub fn read_shard(
        &self,
        names: &[String],
        transposed: bool,
        spec: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, CheckpointError> {
        assert!(
            !names.is_empty(),
            "a parameter is made of one tensor at least"
        );
        let transposed = transposed && spec.global_shape.len() >= 2;
        let parts = self.parts(names, transposed, &spec.global_shape)?;
        let dtype = match dtype {
            Some(dtype) => dtype,
            None => self.common_dtype(&parts)?,
        };
        let shape = Matrices::of(spec);
        let local_shape = spec.local_shape();
        filled(local_shape, dtype, |local| {
            for part in &parts {
                let Some(copy) = MatrixCopy::new(part.header.dtype, dtype) else {
                    let path = self.path().to_path_buf();
                    let name = part.header.name.clone();
                    let found = format!("{:?}", part.header.dtype);
                    let expected = format!("{dtype:?}");
                    return Err(CheckpointError::Dtype {
                        path,
                        name,
                        expected,
                        found,
                    });
                };
                shape.read(&copy, part, &spec.pieces, transposed, local)?;
            }
            Ok(())
        })
    }

    /// The tensors and where they stand, their shapes checked.
    fn parts(
        &self,
        names: &[String],
        transposed: bool,
        shape: &[usize],
    ) -> Result<Vec<HfPartReader<'_>>, CheckpointError> {
        let mut parts = Vec::with_capacity(names.len());
        let mut end = 0;
        for name in names {
            let (file, header, stored) = self.find(name)?;
            let mut expected = shape.to_vec();
            let found = swapped(&header.shape, transposed);
            // Of several side by side, only the sum of the lengths along the last dim is known.
            if let (true, Some(len), Some(&own)) =
                (names.len() > 1, expected.last_mut(), found.last())
            {
                *len = own;
            }
            if found != expected {
                return Err(CheckpointError::Shape {
                    path: file.to_path_buf(),
                    name: format!("`{name}`"),
                    expected: swapped(&expected, transposed),
                    found: header.shape,
                });
            }
            let columns = end..end + found.last().copied().unwrap_or(1);
            end = columns.end;
            parts.push(HfPartReader {
                header,
                stored,
                columns,
            });
        }
        let mut found = shape.to_vec();
        if let Some(len) = found.last_mut() {
            *len = end;
        }
        if found != shape {
            let name =
                |part: &HfPartReader<'_>| format!("`{}` {:?}", part.header.name, part.header.shape);
            return Err(CheckpointError::Shape {
                path: self.path().to_path_buf(),
                name: parts.iter().map(name).collect::<Vec<_>>().join(" beside "),
                expected: swapped(shape, transposed),
                found: swapped(&found, transposed),
            });
        }
        Ok(parts)
    }

    fn common_dtype(&self, parts: &[HfPartReader<'_>]) -> Result<DType, CheckpointError> {
        let dtype = parts[0].header.dtype;
        if parts.iter().all(|part| part.header.dtype == dtype) {
            return Ok(dtype);
        }
        let name =
            |part: &HfPartReader<'_>| format!("`{}` is {:?}", part.header.name, part.header.dtype);
        let tensors = parts.iter().map(name).collect::<Vec<_>>().join(", ");
        Err(CheckpointError::MixedDtypes {
            path: self.path().to_path_buf(),
            tensors,
        })
    }
}

/// The shape with the last two dims swapped.
pub(super) fn swapped(shape: &[usize], swap: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let (true, [.., a, b]) = (swap, shape.as_mut_slice()) {
        std::mem::swap(a, b);
    }
    shape
}

/// A rectangle of a matrix: where it stands in the stored tensor and in the result, and its rows
/// and columns in the result.
struct Rectangle {
    from: MatrixBlock,
    to: MatrixBlock,
    size: (usize, usize),
}

/// A tensor of any number of dims as matrices one after the other, and how a rank cuts it.
struct Matrices {
    outer: Vec<usize>,
    rows: usize,
    cols: usize,
    dim: usize,
    local_len: usize,
}

impl Matrices {
    fn of(spec: &ShardSpec) -> Self {
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

    /// Reads what a part and a rank's pieces share.
    fn read(
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

    /// The rectangles that a part and a rank's piece share, one of each matrix.
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
        // What the piece has of a dim, and how far it stands from there in the local tensor.
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
        let width = part.columns.len();
        let start = col_range.start.max(part.columns.start);
        let col_range = start..col_range.end.min(part.columns.end).max(start);
        if row_range.is_empty() || col_range.is_empty() {
            return Vec::new();
        }
        let row = row_range.start;
        let col = col_range.start - part.columns.start;
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

    /// The number of each matrix of which the piece has something, in the whole and in the local
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
/// elements, a band of lines at a time.
fn read_transposed(
    copy: &MatrixCopy,
    stored: Stored<'_>,
    (from, to): (MatrixBlock, MatrixBlock),
    (rows, cols): (usize, usize),
    local: &mut [u8],
) -> Result<(), CheckpointError> {
    let size = stored.size;
    // Lines close to each other are read with what is between them.
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
