use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;

use super::{
    HfDir,
    rectangles::{HfPartReader, Matrices},
};
use crate::{buffer::filled, error::CheckpointError, transpose::MatrixCopy};

impl HfDir {
    /// Reads a rank's local values of a parameter that the tensors `names` make up, concatenated
    /// along its last dimension. With `transposed`, each tensor is stored with its last two
    /// dimensions swapped (published linear weights are `[out, in]`, megaburn's are `[in, out]`).
    /// Vectors and scalars are never transposed.
    ///
    /// Only what `spec` selects is read from the files, including small gaps. Besides the result,
    /// one block of 1 MiB is in memory; for a transposed tensor, 16 MiB or one line. Floats are
    /// cast to `dtype`, rounding to nearest; with `None` they keep the files' type.
    ///
    /// # Shapes
    /// `spec.local_shape()`, with zero padding.
    /// # Errors
    /// A tensor is missing (the error names the nearest); the shapes do not make up
    /// `spec.global_shape`; there are several element types and no `dtype`; or a type cannot be
    /// cast to `dtype`.
    /// # Panics
    /// If `names` is empty.
    pub fn read_shard(
        &self,
        names: &[String],
        transposed: bool,
        spec: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, CheckpointError> {
        assert!(!names.is_empty(), "a parameter has at least one tensor");
        let transposed = transposed && spec.global_shape.len() >= 2;
        let parts = self.parts(names, transposed, &spec.global_shape, dtype.is_some())?;
        self.read_parts(&parts, transposed, spec, dtype)
    }

    /// Like [`read_shard`](Self::read_shard), but the parameter is the one tensor `name`, whose
    /// columns are the ranges `columns` of the parameter's last dimension, one after another.
    ///
    /// # Errors
    /// See [`read_shard`](Self::read_shard).
    /// # Panics
    /// If `columns` are not all of the parameter's last dimension, each once.
    pub fn read_shard_in_order(
        &self,
        name: &str,
        columns: &[Range<usize>],
        transposed: bool,
        spec: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, CheckpointError> {
        let transposed = transposed && spec.global_shape.len() >= 2;
        // Column by column would read the tensor once for each column.
        if columns.len() > 1 && columns.iter().all(|range| range.len() == 1) {
            return self.read_permuted(name, columns, transposed, spec, dtype);
        }
        let names = [name.to_string()];
        let whole = self.parts(&names, transposed, &spec.global_shape, dtype.is_some())?;
        let HfPartReader {
            header,
            stored,
            width,
            ..
        } = &whole[0];
        assert!(
            is_permutation(columns, *width),
            "{columns:?} are not all {width} columns of {name}"
        );
        let mut end = 0;
        let part = |columns: &Range<usize>| {
            let start = end;
            end += columns.len();
            HfPartReader {
                header: header.clone(),
                stored: *stored,
                width: *width,
                start,
                columns: columns.clone(),
            }
        };
        let parts: Vec<_> = columns.iter().map(part).collect();
        self.read_parts(&parts, transposed, spec, dtype)
    }

    fn read_parts(
        &self,
        parts: &[HfPartReader<'_>],
        transposed: bool,
        spec: &ShardSpec,
        dtype: Option<DType>,
    ) -> Result<TensorData, CheckpointError> {
        let dtype = match dtype {
            Some(dtype) => dtype,
            None => self.common_dtype(parts)?,
        };
        let shape = Matrices::of(spec);
        let local_shape = spec.local_shape();
        filled(local_shape, dtype, |local| {
            for part in parts {
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

    /// Finds the tensors and checks their shapes.
    fn parts(
        &self,
        names: &[String],
        transposed: bool,
        shape: &[usize],
        are_cast: bool,
    ) -> Result<Vec<HfPartReader<'_>>, CheckpointError> {
        let mut parts = Vec::with_capacity(names.len());
        let mut end = 0;
        for name in names {
            let (file, header, stored) = if are_cast {
                self.find_to_cast(name)?
            } else {
                self.find(name)?
            };
            let mut expected = shape.to_vec();
            let found = swapped(&header.shape, transposed);
            // If there are several tensors, only the sum of their lengths along the last dimension
            // is known.
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
                width: columns.len(),
                start: 0,
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
                name: parts.iter().map(name).collect::<Vec<_>>().join(" and "),
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

/// Whether `ranges` are all numbers below `len`, each once.
fn is_permutation(ranges: &[Range<usize>], len: usize) -> bool {
    let mut ranges: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let end = ranges
        .iter()
        .try_fold(0, |end, range| (range.start == end).then_some(range.end));
    end == Some(len)
}

/// The shape, with the last two dimensions swapped if `swap` is set.
pub(super) fn swapped(shape: &[usize], swap: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let (true, [.., a, b]) = (swap, shape.as_mut_slice()) {
        std::mem::swap(a, b);
    }
    shape
}
