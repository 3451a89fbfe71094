use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::{Axis, ShardPiece, ShardSpec};

use crate::error::CheckpointError;

/// The name, type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// The tensor's name in the file.
    pub name: String,
    /// Element type in the file.
    pub dtype: DType,
    /// Shape in the file.
    pub shape: Vec<usize>,
}

impl TensorHeader {
    /// Length of dimension 0; a scalar has one row.
    pub fn num_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements per row.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// The shape of some of the rows; a scalar stays a scalar.
    pub(crate) fn rows_shape(&self, rows: &Range<usize>) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(len) = shape.first_mut() {
            *len = rows.len();
        }
        shape
    }

    /// Splits the rows into blocks of about `bytes` bytes, at least one row each, in order.
    pub(crate) fn blocks(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> {
        let row = (self.row_len() * self.dtype.size()).max(1);
        let rows = (bytes / row).max(1);
        let num_rows = self.num_rows();
        (0..num_rows)
            .step_by(rows)
            .map(move |start| start..(start + rows).min(num_rows))
    }
}

/// A set of named tensors of any origin, which can be compared or written elsewhere.
pub trait TensorSource {
    /// A name for messages: the path.
    fn label(&self) -> String;

    /// All tensors, sorted by name.
    fn headers(&self) -> Vec<TensorHeader>;

    /// Some rows of a tensor (along dimension 0), in its own element type.
    ///
    /// # Shapes
    /// `[rows.len(), ..]`; for a scalar, whose only row is 0, `[]`.
    /// # Errors
    /// There is no such tensor (the error names the nearest), or a file is damaged.
    /// # Panics
    /// If the tensor does not have these rows.
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

/// A shard spec for any ranges of one dimension, one after another, independent of ranks.
///
/// # Panics
/// If the tensor does not have one of the ranges.
pub(crate) fn slice_spec(
    shape: &[usize],
    dim: usize,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> ShardSpec {
    let len = shape.get(dim).copied().unwrap_or(1);
    let mut local_len = 0;
    let piece = |global: Range<usize>| {
        assert!(
            global.start <= global.end && global.end <= len,
            "range {global:?} is out of bounds for {len} elements"
        );
        let start = local_len;
        local_len += global.len();
        ShardPiece {
            global,
            local: start..local_len,
            replica: 0,
            replicas: 1,
        }
    };
    let pieces = ranges.into_iter().map(piece).collect();
    ShardSpec {
        global_shape: shape.to_vec(),
        axis: Axis::Tp,
        dim,
        pieces,
        local_len,
    }
}

/// The name most similar to `name`; empty if `names` is empty.
pub(crate) fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> String {
    let near = |other: &&String| strsim::jaro_winkler(name, other);
    names
        .max_by(|a, b| near(a).total_cmp(&near(b)))
        .cloned()
        .unwrap_or_default()
}
