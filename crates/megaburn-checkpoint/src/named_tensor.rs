use std::{fmt, ops::Range};

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;

use crate::{buffer::filled, dtype, error::CheckpointError, write_plan::Copies};

/// One tensor as a rank holds it. Only the values that this rank writes are requested, one tensor at
/// a time.
pub struct NamedTensor<'a> {
    /// The tensor's name in the checkpoint: `model.` or an optimizer state's name, and the
    /// parameter's path.
    pub name: String,
    /// The part of the global tensor that this rank's local tensor is.
    pub shard: &'a ShardSpec,
    /// Element type.
    pub dtype: DType,
    /// The range of the flattened local tensor that this rank holds.
    pub range: Range<usize>,
    /// The ranks that hold the same range. With `None`, all ranks that hold the tensor under the
    /// layout that saves it.
    pub copies: Option<Copies>,
    /// Whether values that are not finite end the save, which then fails with
    /// [`CheckpointError::NotFinite`].
    pub must_be_finite: bool,
    /// Returns values on demand.
    pub values: Values<'a>,
}

/// Returns a range of the flattened local tensor, padding included. It is called before anything is
/// changed on the device; what it returns may be called later and on another thread.
pub type Values<'a> = Box<dyn FnOnce(Range<usize>) -> Result<PendingValues, CheckpointError> + 'a>;

/// Values that are on their way to the host, flat.
pub type PendingValues = Box<dyn FnOnce() -> Result<TensorData, CheckpointError> + Send>;

impl<'a> NamedTensor<'a> {
    /// A tensor whose values are available: the local tensor.
    pub fn new(name: impl Into<String>, shard: &'a ShardSpec, data: TensorData) -> Self {
        Self::lazy(name, shard, data.dtype(), move || Ok(data))
    }

    /// A tensor whose local values `data` returns when they are written, in the local shape or
    /// flat. `data` is not called if this rank writes nothing of the tensor. An error of `data`
    /// ends the save on all ranks.
    pub fn lazy(
        name: impl Into<String>,
        shard: &'a ShardSpec,
        dtype: DType,
        data: impl FnOnce() -> Result<TensorData, CheckpointError> + 'a,
    ) -> Self {
        let name = name.into();
        let expected: usize = shard.local_shape().iter().product();
        let own = name.clone();
        Self::ranged(name, shard, dtype, move |range| {
            let data = data()?;
            let found = data.num_elements();
            if found != expected {
                return Err(CheckpointError::LocalShape {
                    name: own,
                    found,
                    expected,
                });
            }
            let size = data.dtype().size();
            let values = if range.len() == found {
                data
            } else {
                let wanted = &data.as_bytes()[range.start * size..range.end * size];
                filled(vec![range.len()], data.dtype(), |bytes| {
                    bytes.copy_from_slice(wanted);
                    Ok::<_, CheckpointError>(())
                })?
            };
            Ok(Box::new(move || Ok(values)))
        })
    }

    /// A tensor of which ranges of the flattened local tensor can be read.
    pub fn ranged(
        name: impl Into<String>,
        shard: &'a ShardSpec,
        dtype: DType,
        values: impl FnOnce(Range<usize>) -> Result<PendingValues, CheckpointError> + 'a,
    ) -> Self {
        Self {
            name: name.into(),
            shard,
            dtype,
            range: 0..shard.local_shape().iter().product(),
            copies: None,
            must_be_finite: false,
            values: Box::new(values),
        }
    }

    /// Says that this rank holds only the range `range` of the flattened local tensor, and that the
    /// ranks of `copies` hold the same.
    #[must_use]
    pub fn holding(self, range: Range<usize>, copies: Copies) -> Self {
        Self {
            range,
            copies: Some(copies),
            ..self
        }
    }

    /// Ends the save if a value that is written is not finite; the thread that hashes the values
    /// checks that.
    #[must_use]
    pub fn with_must_be_finite(self, must_be_finite: bool) -> Self {
        Self {
            must_be_finite,
            ..self
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
            range,
            copies,
            must_be_finite,
            values: _,
        } = self;
        f.debug_struct("NamedTensor")
            .field("name", name)
            .field("shard", shard)
            .field("dtype", dtype)
            .field("range", range)
            .field("copies", copies)
            .field("must_be_finite", must_be_finite)
            .finish_non_exhaustive()
    }
}
