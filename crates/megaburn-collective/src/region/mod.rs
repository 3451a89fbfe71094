//! Differentiable moves of tensors between ranks. Each region function pairs what it does forward
//! with what it does to the gradient backward; the two are adjoint. The names are Megatron's
//! (`megatron/core/tensor_parallel/mappings.py`).
//!
//! | region | forward | backward |
//! |---|---|---|
//! | [`copy_to`] | identity | all-reduce |
//! | [`reduce_from`] | all-reduce | identity |
//! | [`scatter_to_last_dim`] | own shard of the last dim | all-gather |
//! | [`gather_from_last_dim`] | all-gather along the last dim | own shard |
//! | [`scatter_to_sequence`] | own shard of dim 0 | all-gather |
//! | [`gather_from_sequence`] | all-gather along dim 0 | reduce-scatter |
//! | [`gather_from_sequence_to_replicas`] | all-gather along dim 0 | own shard |
//! | [`reduce_scatter_to_sequence`] | reduce-scatter along dim 0 | all-gather |
//! | [`all_to_all`] | all-to-all (split a, concatenate b) | all-to-all (split b, concatenate a) |
//! | [`ring_shift`] | send to the member `by` places further | send back |
//!
//! All members of the group call these functions in the same order. A group of one returns its
//! input at once. When a collective fails (a dead peer, ranks that disagree), the region function
//! panics with the error's text, because Burn's tensor operations cannot return errors, least of
//! all in the middle of `backward`. [`crate::run_threads`] and the trainer turn the panic into an
//! error; [`crate::Group::failure`] holds it.

#[cfg(feature = "cuda")]
mod gpu;
mod moves;
#[cfg(any(feature = "cuda", test))]
mod on_device;
mod op;
mod placement;

use burn::tensor::Tensor;
pub use op::{FAILED_REGION, unwrap_collective};
pub use placement::{Partial, SequenceShard};

use crate::{group::Group, region::moves::Move};

/// Lets every member use the same tensor: identity forward, sum of the gradients backward.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// Forward: none. Backward: one all-reduce of the gradient.
pub fn copy_to<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Identity, Move::AllReduce, group)
}

/// Sums the members' partial tensors; every member gets the sum. The gradient is equal on all
/// members, so backward is the identity.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// Forward: one all-reduce. Backward: none.
pub fn reduce_from<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::AllReduce, Move::Identity, group)
}

/// Returns this member's shard of the last dimension of a replicated tensor.
///
/// # Shapes
/// `[.., n * d]` to `[.., d]`.
/// # Collective
/// Forward: none. Backward: one all-gather.
pub fn scatter_to_last_dim<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(
        x,
        Move::Split { dim: D - 1 },
        Move::AllGather { dim: D - 1 },
        group,
    )
}

/// Concatenates the members' shards of the last dimension; every member gets the full tensor.
///
/// # Shapes
/// `[.., d]` to `[.., n * d]`.
/// # Collective
/// Forward: one all-gather. Backward: none.
pub fn gather_from_last_dim<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(
        x,
        Move::AllGather { dim: D - 1 },
        Move::Split { dim: D - 1 },
        group,
    )
}

/// Returns this member's shard of the sequence of a replicated tensor.
///
/// # Shapes
/// `[n * s, ..]` to `[s, ..]`.
/// # Collective
/// Forward: none. Backward: one all-gather.
pub fn scatter_to_sequence<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Split { dim: 0 }, Move::AllGather { dim: 0 }, group)
}

/// Concatenates the sequence shards for a computation that is split over the group. Each member's
/// gradient of the full tensor is partial, so backward sums them.
///
/// # Shapes
/// `[s, ..]` to `[n * s, ..]`.
/// # Collective
/// Forward: one all-gather. Backward: one reduce-scatter.
pub fn gather_from_sequence<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(
        x,
        Move::AllGather { dim: 0 },
        Move::ReduceScatter { dim: 0 },
        group,
    )
}

/// Concatenates the sequence shards for a computation that every member repeats. Each member's
/// gradient is already complete, so backward only takes its shard.
///
/// # Shapes
/// `[s, ..]` to `[n * s, ..]`.
/// # Collective
/// Forward: one all-gather. Backward: none.
pub fn gather_from_sequence_to_replicas<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::AllGather { dim: 0 }, Move::Split { dim: 0 }, group)
}

/// Sums the members' partial tensors and returns this member's shard of the sequence.
///
/// # Shapes
/// `[n * s, ..]` to `[s, ..]`.
/// # Collective
/// Forward: one reduce-scatter. Backward: one all-gather.
pub fn reduce_scatter_to_sequence<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(
        x,
        Move::ReduceScatter { dim: 0 },
        Move::AllGather { dim: 0 },
        group,
    )
}

/// The elementwise maximum over the members, on every member; NaN where any member has NaN. It
/// carries no gradient and is meant for statistics such as the row max of a softmax.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// One all-reduce.
pub fn max_over<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x.inner(), Move::AllReduceMax, Move::Identity, group)
}

/// Splits dimension `split` into one part per member, sends part `i` to member `i` and concatenates
/// the received parts along `concat`. Used to exchange heads for sequence and back.
///
/// # Shapes
/// Dim `split` shrinks by the number of members, dim `concat` grows by it.
/// # Collective
/// Forward and backward: one all-to-all.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    split: usize,
    concat: usize,
    group: &Group,
) -> Tensor<D> {
    let there = Move::AllToAll { split, concat };
    let back = Move::AllToAll {
        split: concat,
        concat: split,
    };
    op::apply(x, there, back, group)
}

/// Sends the tensor to the member `by` places further in the ring of members (negative: backwards),
/// and returns the one received.
///
/// # Shapes
/// Any, the same on all members; unchanged.
/// # Collective
/// Forward and backward: one send and one receive.
pub fn ring_shift<const D: usize>(x: Tensor<D>, by: isize, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Shift { by }, Move::Shift { by: -by }, group)
}
