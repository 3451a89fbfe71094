use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::{Piece, ShardSpec};

use super::HfDir;
use crate::{
    CheckpointError, TensorHeader,
    buffer::filled,
    plane::{Plane, PlaneCopy},
};

/// A tensor of the folder that is a part of a parameter.
struct Part<'a> {
    header: TensorHeader,
    bytes: &'a [u8],
    /// Which part of the parameter's last dim it is.
    columns: Range<usize>,
}

impl HfDir {
    /// A rank's local values of the parameter that the tensors `names` make up, side by side along
    /// its last dim; each is stored with the last two dims swapped if `transposed` (published
    /// linear weights are `[out, in]`, those of megaburn `[in, out]`). Vectors and scalars are never
    /// transposed.
    ///
    /// Only what `spec` names is read from the files, straight into the result: no other memory is
    /// taken. Floats become `dtype`, each rounded to the nearest; without one the files' type stays.
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
        assert!(!names.is_empty(), "a parameter is made of one tensor at least");
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
                let Some(copy) = PlaneCopy::new(part.header.dtype, dtype) else {
                    let (path, name) = (self.path().to_path_buf(), part.header.name.clone());
                    let found = format!("{:?}", part.header.dtype);
                    let expected = format!("{dtype:?}");
                    return Err(CheckpointError::Dtype { path, name, expected, found });
                };
                for piece in &spec.pieces {
                    shape.copy(&copy, part, piece, transposed, local);
                }
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
    ) -> Result<Vec<Part<'_>>, CheckpointError> {
        let mut parts = Vec::with_capacity(names.len());
        let mut end = 0;
        for name in names {
            let (file, header, bytes) = self.find(name)?;
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
            parts.push(Part { header, bytes, columns });
        }
        let mut found = shape.to_vec();
        if let Some(len) = found.last_mut() {
            *len = end;
        }
        if found != shape {
            let name = |part: &Part<'_>| format!("`{}` {:?}", part.header.name, part.header.shape);
            return Err(CheckpointError::Shape {
                path: self.path().to_path_buf(),
                name: parts.iter().map(name).collect::<Vec<_>>().join(" beside "),
                expected: swapped(shape, transposed),
                found: swapped(&found, transposed),
            });
        }
        Ok(parts)
    }

    fn common_dtype(&self, parts: &[Part<'_>]) -> Result<DType, CheckpointError> {
        let dtype = parts[0].header.dtype;
        if parts.iter().all(|part| part.header.dtype == dtype) {
            return Ok(dtype);
        }
        let name = |part: &Part<'_>| format!("`{}` is {:?}", part.header.name, part.header.dtype);
        let tensors = parts.iter().map(name).collect::<Vec<_>>().join(", ");
        Err(CheckpointError::MixedDtypes { path: self.path().to_path_buf(), tensors })
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
        let (rows, cols) = (matrix[0], matrix[1]);
        Self { outer: outer.to_vec(), rows, cols, dim, local_len: spec.local_len }
    }

    /// Copies what a part and a rank's piece share.
    fn copy(
        &self,
        copy: &PlaneCopy,
        part: &Part<'_>,
        piece: &Piece,
        transposed: bool,
        local: &mut [u8],
    ) {
        let Self { rows, cols, local_len, .. } = *self;
        let num_outer = self.outer.len();
        // What the piece has of a dim, and how far it stands from there in the local tensor.
        let held = |dim: usize, len: usize| match dim == self.dim {
            true => (piece.global.clone(), local_len),
            false => (0..len, len),
        };
        let to_local = |dim: usize, at: usize| match dim == self.dim {
            true => at - piece.global.start + piece.local.start,
            false => at,
        };
        let (row_range, local_rows) = held(num_outer, rows);
        let (col_range, local_cols) = held(num_outer + 1, cols);
        let width = part.columns.len();
        let start = col_range.start.max(part.columns.start);
        let col_range = start..col_range.end.min(part.columns.end).max(start);
        if row_range.is_empty() || col_range.is_empty() {
            return;
        }
        let (row, col) = (row_range.start, col_range.start - part.columns.start);
        let (to_row, to_col) = (to_local(num_outer, row), to_local(num_outer + 1, col_range.start));
        let size = (row_range.len(), col_range.len());
        for (from, to) in self.outer_pairs(piece) {
            let (base, matrix) = (to * local_rows * local_cols, from * rows * width);
            let to = Plane { start: base + to_row * local_cols + to_col, stride: local_cols };
            match transposed {
                true => {
                    let from = Plane { start: matrix + col * rows + row, stride: rows };
                    copy.transposed((part.bytes, from), (local, to), size);
                }
                false => {
                    let from = Plane { start: matrix + row * width + col, stride: width };
                    copy.straight((part.bytes, from), (local, to), size);
                }
            }
        }
    }

    /// The number of each matrix of which the piece has something, in the whole and in the local
    /// tensor.
    fn outer_pairs(&self, piece: &Piece) -> Vec<(usize, usize)> {
        let Some(&len) = self.outer.get(self.dim) else {
            return (0..self.outer.iter().product()).map(|i| (i, i)).collect();
        };
        let before: usize = self.outer[..self.dim].iter().product();
        let after: usize = self.outer[self.dim + 1..].iter().product();
        let mut pairs = Vec::new();
        for b in 0..before {
            for (from, to) in piece.global.clone().zip(piece.local.clone()) {
                let (from, to) = (b * len + from, b * self.local_len + to);
                pairs.extend((0..after).map(|a| (from * after + a, to * after + a)));
            }
        }
        pairs
    }
}
