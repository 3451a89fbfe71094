use std::{collections::BTreeMap, ops::Range, slice::from_ref};

use burn::tensor::{DType, TensorData};

use super::read::swapped;
use crate::{
    buffer::filled,
    checkpoint::Checkpoint,
    error::CheckpointError,
    source::{TensorHeader, TensorSource, nearest, slice_spec},
    transpose::{MatrixBlock, MatrixCopy},
};

/// A checkpoint viewed as the tensors of a published model.
#[derive(Debug)]
pub struct HfView<'a> {
    checkpoint: &'a Checkpoint,
    entries: BTreeMap<String, (HfEntry, DType, Vec<usize>)>,
}

/// How a published tensor is made from a tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfEntry {
    /// The published name.
    pub name: String,
    /// The name of the checkpoint's tensor.
    pub tensor: String,
    /// The ranges of the last dimension of the checkpoint's tensor that it contains, one after
    /// another.
    pub columns: Vec<Range<usize>>,
    /// Whether the last two dimensions are swapped; vectors are never transposed.
    pub transposed: bool,
}

impl<'a> HfView<'a> {
    /// Views `checkpoint` as the tensors that `entries` describe.
    ///
    /// # Errors
    /// An entry names a tensor that the checkpoint lacks (the error names the nearest) or columns
    /// that the tensor lacks; or a name occurs twice.
    pub fn new(checkpoint: &'a Checkpoint, entries: Vec<HfEntry>) -> Result<Self, CheckpointError> {
        let mut known = BTreeMap::new();
        for entry in entries {
            let shape = checkpoint.global_shape(&entry.tensor)?.to_vec();
            let dtype = checkpoint.dtype(&entry.tensor)?;
            let HfEntry {
                name,
                tensor,
                columns,
                ..
            } = entry.clone();
            let refuse = |why: String| {
                let name = name.clone();
                let shape = shape.clone();
                Err(CheckpointError::Entry {
                    name,
                    tensor,
                    shape,
                    why,
                })
            };
            let width = shape.last().copied().unwrap_or(1);
            let is_in = |range: &&Range<usize>| range.start <= range.end && range.end <= width;
            if let Some(range) = columns.iter().find(|range| !is_in(range)) {
                return refuse(format!("columns {range:?} are out of range"));
            }
            if known.contains_key(&name) {
                return refuse("another tensor already has this name".into());
            }
            known.insert(name, (entry, dtype, shape));
        }
        Ok(Self {
            checkpoint,
            entries: known,
        })
    }
}

impl TensorSource for HfView<'_> {
    fn label(&self) -> String {
        self.checkpoint.label()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        let header = |(entry, dtype, shape): &(HfEntry, DType, Vec<usize>)| {
            let mut shape = shape.clone();
            if let Some(len) = shape.last_mut() {
                *len = total(&entry.columns);
            }
            let shape = swapped(&shape, entry.transposed);
            TensorHeader {
                name: entry.name.clone(),
                dtype: *dtype,
                shape,
            }
        };
        self.entries.values().map(header).collect()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        let Some((entry, dtype, shape)) = self.entries.get(name) else {
            let path = self.checkpoint.path().to_path_buf();
            let name = name.to_string();
            let nearest = nearest(&name, self.entries.keys());
            return Err(CheckpointError::MissingTensor {
                path,
                name,
                nearest,
            });
        };
        let HfEntry {
            tensor,
            columns,
            transposed,
            ..
        } = entry;
        let read = |dim, ranges| {
            self.checkpoint
                .read(tensor, &slice_spec(shape, dim, ranges), *dtype)
        };
        match shape.as_slice() {
            [] => read(0, vec![rows]),
            [_] => read(0, part(columns, rows)),
            // The rows requested are columns of the stored tensor; only those are read.
            [len, _] if *transposed => {
                let all = 0..rows.len();
                let data = read(1, part(columns, rows))?;
                arranged(&data, (*len, all.len()), from_ref(&all), true)
            }
            [.., num_rows, num_cols] => {
                let num_rows = if shape.len() == 2 {
                    rows.len()
                } else {
                    *num_rows
                };
                let data = read(0, vec![rows])?;
                if !*transposed && columns.as_slice() == from_ref(&(0..*num_cols)) {
                    Ok(data)
                } else {
                    arranged(&data, (num_rows, *num_cols), columns, *transposed)
                }
            }
        }
    }
}

/// The length of all ranges together.
fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// The ranges at positions `of` of the elements that `ranges` name, one after another.
fn part(ranges: &[Range<usize>], of: Range<usize>) -> Vec<Range<usize>> {
    let mut end = 0;
    let held = |range: &Range<usize>| {
        let start = end;
        end += range.len();
        let from = of.start.clamp(start, end) - start;
        let to = of.end.clamp(start, end) - start;
        (from < to).then(|| range.start + from..range.start + to)
    };
    ranges.iter().filter_map(held).collect()
}

/// Selects `columns` of consecutive matrices, one after another, and with `transposed` transposes
/// each matrix.
fn arranged(
    data: &TensorData,
    (rows, cols): (usize, usize),
    columns: &[Range<usize>],
    transposed: bool,
) -> Result<TensorData, CheckpointError> {
    let dtype = data.dtype();
    let source = data.as_bytes();
    let copy = MatrixCopy::new(dtype, dtype).expect("every type converts to itself");
    let mut shape = data.shape().to_vec();
    let width = total(columns);
    *shape
        .last_mut()
        .expect("the tensor has at least one dimension") = width;
    let outer = data.num_elements().checked_div(rows * cols).unwrap_or(0);
    filled(swapped(&shape, transposed), dtype, |dest| {
        for matrix in 0..outer {
            let mut before = 0;
            for range in columns {
                let num_cols = range.len();
                let from = MatrixBlock {
                    start: matrix * rows * cols + range.start,
                    stride: cols,
                };
                let start = matrix * rows * width;
                if transposed {
                    let to = MatrixBlock {
                        start: start + before * rows,
                        stride: rows,
                    };
                    copy.transposed((source, from), (dest, to), (num_cols, rows));
                } else {
                    let to = MatrixBlock {
                        start: start + before,
                        stride: width,
                    };
                    copy.straight((source, from), (dest, to), (rows, num_cols));
                }
                before += num_cols;
            }
        }
        Ok(())
    })
}
