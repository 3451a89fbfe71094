//! What a rank writes of a tensor, before and after its values are in memory.

use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;
use safetensors::Dtype;

use super::budget::Reservation;
use crate::{
    error::CheckpointError,
    manifest::{PieceInfo, TensorInfo, at_least_1d},
    piece_index::PieceIndex,
    write_plan::WrittenPiece,
};

/// A tensor that this rank writes pieces of.
#[derive(Debug)]
pub(crate) struct TensorPlan {
    pub(crate) name: String,
    pub(crate) shard: ShardSpec,
    pub(crate) dtype: DType,
    pub(crate) file_dtype: Dtype,
    /// Whether values that are not finite end the save.
    pub(crate) must_be_finite: bool,
    /// At least one.
    pub(crate) pieces: Vec<WrittenPiece>,
    /// The range of the flattened local tensor that holds the pieces.
    pub(crate) range: Range<usize>,
}

/// A tensor, and where its values come from.
pub(crate) struct PlannedTensor<V> {
    pub(crate) plan: TensorPlan,
    /// Gives the range of the plan.
    pub(crate) values: V,
}

/// A tensor whose values are in memory.
#[derive(Debug)]
pub(super) struct LoadedTensor<'a> {
    pub(super) plan: TensorPlan,
    data: TensorData,
    _memory: Reservation<'a>,
}

impl TensorPlan {
    /// The tensor, as the manifest describes it.
    pub(super) fn info(&self) -> TensorInfo {
        TensorInfo {
            dtype: self.file_dtype,
            global_shape: self.shard.global_shape.clone(),
        }
    }

    /// Describes a piece that is written. Its key is the tensor's name, `#` and the start of its
    /// slice, `@` and its first element, where it is not the full tensor or slice.
    pub(super) fn piece_info(&self, written: &WrittenPiece) -> PieceInfo {
        let Self { name, shard, .. } = self;
        let range = shard.pieces[written.piece].global.clone();
        let is_whole = range.len() == at_least_1d(&shard.global_shape)[shard.dim];
        let mut key = name.clone();
        if !is_whole {
            key += &format!("#{}", range.start);
        }
        if !written.is_full {
            key += &format!("@{}", written.range.start);
        }
        PieceInfo {
            tensor: name.clone(),
            key,
            dim: shard.dim,
            range,
            elements: (!written.is_full).then(|| written.range.clone()),
            chunks: Vec::new(),
        }
    }

    /// Bytes of the values that are read.
    pub(super) fn num_read_bytes(&self) -> usize {
        self.range.len() * self.dtype.size()
    }
}

impl<'a> LoadedTensor<'a> {
    /// # Errors
    /// `data` has another type or number of elements than planned.
    pub(super) fn new(
        plan: TensorPlan,
        data: TensorData,
        memory: Reservation<'a>,
    ) -> Result<Self, CheckpointError> {
        let TensorPlan { dtype, range, .. } = &plan;
        if data.dtype() != *dtype {
            let why = format!("it is {:?}, but {dtype:?} was expected", data.dtype());
            let name = plan.name;
            return Err(CheckpointError::Source { name, why });
        }
        let (found, expected) = (data.num_elements(), range.len());
        if found != expected {
            return Err(CheckpointError::LocalShape {
                name: plan.name,
                found,
                expected,
            });
        }
        Ok(Self {
            plan,
            data,
            _memory: memory,
        })
    }

    /// Calls `f` with the bytes of each contiguous run of a piece, up to its first error.
    pub(super) fn for_each_run(
        &self,
        written: &WrittenPiece,
        mut f: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let TensorPlan {
            shard,
            dtype,
            range,
            ..
        } = &self.plan;
        let (bytes, size) = (self.data.as_bytes(), dtype.size());
        let mut result = Ok(());
        let index = PieceIndex::new(shard, &shard.pieces[written.piece]);
        index.for_each_run(written.range.clone(), |local, len| {
            if result.is_ok() {
                result = f(&bytes[(local - range.start) * size..][..len * size]);
            }
        });
        result
    }
}
