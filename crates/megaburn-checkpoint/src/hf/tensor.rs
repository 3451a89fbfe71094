use std::{collections::BTreeMap, path::Path, sync::Arc};

use burn::tensor::DType;

use crate::{runs::Stored, sizes::num_elements, source::TensorHeader, tensor_bytes::TensorBytes};

/// The tensors of a folder, by name.
pub(super) type Tensors = BTreeMap<String, HfTensor>;

/// A tensor of a published model, and where its elements are: in row-major order, little-endian,
/// one after the other.
#[derive(Clone, Debug)]
pub struct HfTensor {
    /// The element type.
    pub dtype: DType,
    /// The shape, whose number of bytes can be counted.
    pub shape: Vec<usize>,
    /// What the elements are read from.
    pub bytes: Arc<dyn TensorBytes>,
    /// The place of the first element there.
    pub start: u64,
}

impl HfTensor {
    pub(super) fn path(&self) -> &Path {
        self.bytes.path()
    }

    pub(super) fn header(&self, name: &str) -> TensorHeader {
        TensorHeader {
            name: name.to_string(),
            dtype: self.dtype,
            shape: self.shape.clone(),
        }
    }

    /// Row `row` of the first dimension, which has the name `name`; `None` if there is none.
    pub(super) fn row(&self, name: &str, row: usize) -> Option<(&Path, TensorHeader, Stored<'_>)> {
        let (&rows, shape) = self.shape.split_first()?;
        if row >= rows {
            return None;
        }
        let header = TensorHeader {
            name: name.to_string(),
            dtype: self.dtype,
            shape: shape.to_vec(),
        };
        let whole = self.stored();
        let len = whole.len / rows as u64;
        let start = whole.start + row as u64 * len;
        Some((
            self.path(),
            header,
            Stored {
                start,
                len,
                ..whole
            },
        ))
    }

    pub(super) fn stored(&self) -> Stored<'_> {
        let size = self.dtype.size();
        let elements = num_elements(&self.shape).expect("the shape was checked");
        Stored {
            file: &*self.bytes,
            start: self.start,
            len: (elements * size) as u64,
            size,
        }
    }
}
