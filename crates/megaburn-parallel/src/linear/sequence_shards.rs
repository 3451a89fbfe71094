//! Shards of tokens that a layer gathers after it has quantised them.

use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use megaburn_collective::{
    Group, Lane,
    region::{reduce_scatter_to_sequence, unwrap_collective},
    tensors::{CollectiveElement, all_gather},
};
use megaburn_kernels::{MatrixRole, SequenceShards, ShardCollectives};

use super::split::Split;

/// The shards of the tokens of a layer that is split over a group; `None` without sequence
/// parallelism.
pub(super) fn sequence_shards(
    split: Split,
    sequence_parallel: bool,
    group: &Group,
) -> Option<SequenceShards> {
    let is_sharded = sequence_parallel && group.size() > 1;
    is_sharded.then(|| SequenceShards {
        of: match split {
            Split::Column => MatrixRole::Input,
            Split::Row => MatrixRole::Gradient,
        },
        over: Arc::new(Members(group.clone())),
    })
}

/// The ranks that have shards of the same tokens.
#[derive(Debug)]
struct Members(Group);

impl ShardCollectives for Members {
    fn num_ranks(&self) -> usize {
        self.0.size()
    }

    fn gather(&self, own: Tensor<2>) -> Tensor<2> {
        gathered(own, &self.0)
    }

    fn gather_bytes(&self, own: Tensor<2, Int>) -> Tensor<2, Int> {
        gathered(own, &self.0)
    }

    fn reduce_scatter(&self, partial: Tensor<2>) -> Tensor<2> {
        reduce_scatter_to_sequence(partial, &self.0)
    }
}

fn gathered<K: CollectiveElement>(own: Tensor<2, K>, group: &Group) -> Tensor<2, K> {
    unwrap_collective(all_gather(own, group, Lane::InOrder)).wait()
}
