use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// What one rank wrote. The rank that writes the metadata needs those of all ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DcpRecord {
    /// The name of its file.
    pub(super) file: String,
    pub(super) tensors: Vec<TensorRecord>,
    pub(super) objects: Vec<ObjectRecord>,
}

/// A box of a tensor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct TensorRecord {
    pub(super) name: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) offsets: Vec<usize>,
    pub(super) sizes: Vec<usize>,
    /// The place in the file.
    pub(super) place: [u64; 2],
}

/// An object that is no tensor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct ObjectRecord {
    pub(super) name: String,
    pub(super) place: [u64; 2],
}

impl DcpRecord {
    /// The bytes of the file.
    pub fn num_bytes(&self) -> u64 {
        let places = self.tensors.iter().map(|tensor| tensor.place);
        let places = places.chain(self.objects.iter().map(|object| object.place));
        places.map(|[_, len]| len).sum()
    }
}
