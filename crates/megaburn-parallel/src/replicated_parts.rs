use std::fmt;

use burn::tensor::Tensor;
use megaburn_collective::{Group, region::copy_to};
use megaburn_mesh::{ShardPiece, ShardSpec};

use crate::error::ParallelError;

/// A range of the split dimension that is replicated on some neighbours (the key/value heads, when
/// there are fewer than ranks). Each rank sees the gradient through its own query heads only.
#[derive(Clone)]
pub(crate) struct ReplicatedParts {
    start: usize,
    len: usize,
    holders: Group,
}

impl ReplicatedParts {
    /// The replicated ranges of layer `label`. Each layer gets groups of its own: in a shared
    /// group, mismatched calls of two layers would go unnoticed.
    pub(crate) fn of(
        spec: &ShardSpec,
        group: &Group,
        label: &str,
    ) -> Result<Vec<Self>, ParallelError> {
        let replicated = spec.pieces.iter().filter(|piece| piece.replicas > 1);
        let part = |piece: &ShardPiece| {
            let first = group.rank() - piece.replica;
            let holders = &group.members()[first..first + piece.replicas];
            let holders = group.subgroup(
                &format!(
                    "{}-replicas of {label} from {}",
                    group.name(),
                    piece.global.start
                ),
                holders,
            )?;
            Ok(Self {
                start: piece.local.start,
                len: piece.local.len(),
                holders,
            })
        };
        replicated.map(part).collect()
    }

    /// Returns the same values; backward sums the gradient of the range over its holders.
    pub(crate) fn with_summed_grad<const D: usize>(
        &self,
        param: Tensor<D>,
        dim: usize,
    ) -> Tensor<D> {
        let Self {
            start,
            len,
            holders,
        } = self;
        let total = param.dims()[dim];
        let end = start + len;
        let mut parts = Vec::with_capacity(3);
        if *start > 0 {
            parts.push(param.clone().narrow(dim, 0, *start));
        }
        parts.push(copy_to(param.clone().narrow(dim, *start, *len), holders));
        if end < total {
            parts.push(param.narrow(dim, end, total - end));
        }
        Tensor::cat(parts, dim)
    }
}

impl fmt::Debug for ReplicatedParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}..{} of {:?}",
            self.start,
            self.start + self.len,
            self.holders
        )
    }
}
