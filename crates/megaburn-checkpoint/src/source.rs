use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::{Axis, ShardPiece, ShardSpec};

use crate::{Checkpoint, CheckpointError, TensorInfo};

/// What is known of a tensor without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// Its name in the file.
    pub name: String,
    /// Element type in the file.
    pub dtype: DType,
    /// Shape in the file.
    pub shape: Vec<usize>,
}

impl TensorHeader {
    /// Length of dim 0; a scalar is one row.
    pub fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of a row.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// The shape of some of its rows; a scalar stays one.
    pub(crate) fn rows_shape(&self, rows: &Range<usize>) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(len) = shape.first_mut() {
            *len = rows.len();
        }
        shape
    }

    /// So many rows that they have about `bytes` bytes, one at least, from the first to the last.
    pub(crate) fn blocks(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> {
        let row = (self.row_len() * self.dtype.size()).max(1);
        let rows = (bytes / row).max(1);
        let num_rows = self.num_rows();
        (0..num_rows)
            .step_by(rows)
            .map(move |start| start..(start + rows).min(num_rows))
    }
}

/// A set of named tensors, whatever holds it: to be compared, and to be written elsewhere.
pub trait TensorSource {
    /// What it is, for people: its path.
    fn label(&self) -> String;

    /// All its tensors, sorted by name.
    fn headers(&self) -> Vec<TensorHeader>;

    /// Some rows of a tensor (along dim 0), in its own element type.
    ///
    /// # Shapes
    /// `[rows.len(), ..]`; of a scalar, whose only row is 0, `[]`.
    /// # Errors
    /// No such tensor (the nearest name is given), a damaged file.
    /// # Panics
    /// If it has no such rows.
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError>;
}

impl<T: TensorSource + ?Sized> TensorSource for &T {
    fn label(&self) -> String {
        (**self).label()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        (**self).headers()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        (**self).read_rows(name, rows)
    }
}

impl TensorSource for Checkpoint {
    fn label(&self) -> String {
        self.path().display().to_string()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        let header = |(name, info): (&String, &TensorInfo)| TensorHeader {
            name: name.clone(),
            dtype: info.dtype(),
            shape: info.global_shape.clone(),
        };
        self.manifest().tensors.iter().map(header).collect()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        self.read(
            name,
            &stretch(self.global_shape(name)?, 0, rows),
            self.dtype(name)?,
        )
    }
}

/// A part of a tensor that no rank holds, but somebody wants to see.
///
/// # Panics
/// If the tensor has no such part.
pub(crate) fn stretch(shape: &[usize], dim: usize, global: Range<usize>) -> ShardSpec {
    let len = shape.get(dim).copied().unwrap_or(1);
    assert!(
        global.start <= global.end && global.end <= len,
        "it has no {global:?} of {len}"
    );
    let local_len = global.len();
    let pieces = vec![ShardPiece {
        global,
        local: 0..local_len,
        replica: 0,
        replicas: 1,
    }];
    ShardSpec {
        global_shape: shape.to_vec(),
        axis: Axis::Tp,
        dim,
        pieces,
        local_len,
    }
}

/// The name most like `name`; empty if there is none at all.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> String {
    let near = |other: &&String| strsim::jaro_winkler(name, other);
    names
        .max_by(|a, b| near(a).total_cmp(&near(b)))
        .cloned()
        .unwrap_or_default()
}
