use std::fmt;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;

use crate::{dtype, error::CheckpointError};

/// One tensor as a rank holds it. Its values are requested when they are written, one tensor at a
/// time, and dropped before the next tensor.
pub struct NamedTensor<'a> {
    /// The tensor's name in the checkpoint: `model.` or an optimizer state's name, and the
    /// parameter's path.
    pub name: String,
    /// The part of the global tensor that this rank holds.
    pub shard: &'a ShardSpec,
    /// Element type.
    pub dtype: DType,
    /// Returns the local values, padding included, in the local shape or flat.
    pub data: LazyData<'a>,
}

/// Returns a tensor's local values on demand.
pub type LazyData<'a> = Box<dyn FnOnce() -> Result<TensorData, CheckpointError> + 'a>;

impl<'a> NamedTensor<'a> {
    /// A tensor whose values are available.
    pub fn new(name: impl Into<String>, shard: &'a ShardSpec, data: TensorData) -> Self {
        Self::lazy(name, shard, data.dtype(), move || Ok(data))
    }

    /// A tensor whose values `data` returns when they are written. `data` is not called if this
    /// rank owns nothing of the tensor. An error of `data` ends the save on all ranks.
    pub fn lazy(
        name: impl Into<String>,
        shard: &'a ShardSpec,
        dtype: DType,
        data: impl FnOnce() -> Result<TensorData, CheckpointError> + 'a,
    ) -> Self {
        Self {
            name: name.into(),
            shard,
            dtype,
            data: Box::new(data),
        }
    }

    pub(crate) fn file_dtype(&self) -> Result<safetensors::Dtype, CheckpointError> {
        dtype::to_file(self.dtype).ok_or_else(|| CheckpointError::UnsupportedDtype {
            name: self.name.clone(),
            dtype: format!("{:?}", self.dtype),
        })
    }
}

impl fmt::Debug for NamedTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            shard,
            dtype,
            data: _,
        } = self;
        f.debug_struct("NamedTensor")
            .field("name", name)
            .field("shard", shard)
            .field("dtype", dtype)
            .finish_non_exhaustive()
    }
}
