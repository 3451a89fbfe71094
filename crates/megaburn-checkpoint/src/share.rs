//! What one rank writes of a checkpoint.

use std::{collections::BTreeMap, ops::Range, path::Path, sync::atomic::AtomicBool};

use burn::tensor::TensorData;
use megaburn_collective::{ProcessGroups, Progress};
use megaburn_mesh::ShardSpec;

use crate::{
    error::CheckpointError,
    manifest::{TensorInfo, rank_file},
    named_tensor::{NamedTensor, PendingValues, Values},
    piece_index::PieceIndex,
    report::Report,
    write::{PlannedTensor, TensorPlan, write_rank_file},
    write_plan::{Copies, HeldTensor, WritePlan},
};

/// The tensors that a rank holds, and of these the values that it writes.
pub(crate) struct Share<V> {
    tensors: BTreeMap<String, TensorInfo>,
    planned: Vec<PlannedTensor<V>>,
}

impl<'a> Share<Values<'a>> {
    /// This rank's share of the tensors that the ranks of `groups` hold.
    pub(crate) fn new(
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
        groups: &ProcessGroups,
    ) -> Result<Self, CheckpointError> {
        let copies = |shard: &ShardSpec| {
            let group = if shard.is_expert() {
                &groups.edp
            } else {
                &groups.dp_cp
            };
            Copies {
                index: group.rank(),
                count: group.size(),
            }
        };
        Self::with_copies(tensors, copies)
    }

    /// Everything: a single process has all tensors.
    pub(crate) fn alone(
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    ) -> Result<Self, CheckpointError> {
        Self::with_copies(tensors, |_| Copies::ONE)
    }

    fn with_copies(
        tensors: impl IntoIterator<Item = NamedTensor<'a>>,
        copies: impl Fn(&ShardSpec) -> Copies,
    ) -> Result<Self, CheckpointError> {
        let tensors: Vec<_> = tensors.into_iter().collect();
        let held: Vec<_> = tensors
            .iter()
            .map(|tensor| HeldTensor {
                name: tensor.name.clone(),
                shard: tensor.shard,
                dtype: tensor.dtype,
                range: tensor.range.clone(),
                copies: tensor.copies.unwrap_or_else(|| copies(tensor.shard)),
            })
            .collect();
        let plan = WritePlan::new(&held);
        let mut share = Self {
            tensors: BTreeMap::new(),
            planned: Vec::new(),
        };
        for (tensor, pieces) in tensors.into_iter().zip(plan.into_pieces()) {
            let name = tensor.name.clone();
            let refuse = |why: &str| CheckpointError::Untiled {
                name: name.clone(),
                why: why.into(),
            };
            // The key of a piece is its tensor's name, `#` and its start, `@` and its first element.
            if name.contains(['#', '@']) {
                return Err(refuse("its name contains a `#` or `@`"));
            }
            let file_dtype = tensor.file_dtype()?;
            let info = TensorInfo {
                dtype: file_dtype,
                global_shape: tensor.shard.global_shape.clone(),
            };
            if share.tensors.insert(name.clone(), info).is_some() {
                return Err(refuse("it is given twice"));
            }
            let hulls = pieces.iter().map(|written| {
                PieceIndex::new(tensor.shard, &tensor.shard.pieces[written.piece])
                    .hull(&written.range)
            });
            let join = |a: Range<usize>, b: Range<usize>| a.start.min(b.start)..a.end.max(b.end);
            let Some(range) = hulls.reduce(join) else {
                continue;
            };
            let plan = TensorPlan {
                name,
                shard: tensor.shard.clone(),
                dtype: tensor.dtype,
                file_dtype,
                must_be_finite: tensor.must_be_finite,
                pieces,
                range,
            };
            let values = tensor.values;
            share.planned.push(PlannedTensor { plan, values });
        }
        Ok(share)
    }

    /// Starts to copy the values to the host. Later updates on the device do not change the result.
    pub(crate) fn copied(self) -> Result<Share<PendingValues>, CheckpointError> {
        let Self { tensors, planned } = self;
        let copied = |PlannedTensor { plan, values }: PlannedTensor<Values<'a>>| {
            let values = values(plan.range.clone())?;
            Ok(PlannedTensor { plan, values })
        };
        let planned: Result<_, CheckpointError> = planned.into_iter().map(copied).collect();
        Ok(Share {
            tensors,
            planned: planned?,
        })
    }
}

impl<V> Share<V> {
    /// Writes the file of rank `rank` into `folder`.
    pub(crate) fn write(
        self,
        folder: &Path,
        rank: usize,
        read: impl Fn(V, Range<usize>) -> Result<TensorData, CheckpointError>,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<Report, CheckpointError> {
        let name = rank_file(rank);
        let file = write_rank_file(folder, &name, self.planned, read, progress, is_cancelled)?;
        Ok(Report {
            tensors: self.tensors,
            file,
        })
    }
}
