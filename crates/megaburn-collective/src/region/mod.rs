//! Differentiable moves of tensors between ranks. Each is a pair: what it does forward and, to the
//! gradient, backward; the two are adjoint. Names are Megatron's
//! (`megatron/core/tensor_parallel/mappings.py`).
//!
//! | region | forward | backward |
//! |---|---|---|
//! | [`copy_to`] | identity | all-reduce |
//! | [`reduce_from`] | all-reduce | identity |
//! | [`scatter_to_last_dim`] | own share of the last dim | all-gather |
//! | [`gather_from_last_dim`] | all-gather along the last dim | own share |
//! | [`scatter_to_sequence`] | own share of dim 0 | all-gather |
//! | [`gather_from_sequence`] | all-gather along dim 0 | reduce-scatter |
//! | [`gather_from_sequence_to_replicas`] | all-gather along dim 0 | own share |
//! | [`reduce_scatter_to_sequence`] | reduce-scatter along dim 0 | all-gather |
//! | [`all_to_all`] | all-to-all (split a, join b) | all-to-all (split b, join a) |
//! | [`ring_shift`] | to the member `by` places on | back |
//!
//! All members of the group call them in the same order. A group of one returns at once. When a
//! collective fails (a dead peer, ranks that disagree) the region panics with the error's text:
//! Burn's tensor operations have no other way out, least of all in the middle of `backward`.
//! [`crate::run_threads`] and the trainer turn that into an error; [`crate::Group::failure`] holds it.

#[cfg(feature = "cuda")]
mod gpu;
mod moves;
#[cfg(any(feature = "cuda", test))]
mod on_device;
mod op;
mod placement;

use burn::tensor::Tensor;
pub use op::FAILED_REGION;
pub use placement::{Partial, SequenceShard};

use crate::{Group, region::op::Move};

/// Lets every member use the same tensor: identity forward, sum of the gradients backward.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// Forward: none. Backward: one all-reduce of the gradient.
pub fn copy_to<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Identity, Move::AllReduce, group)
}

/// Sums the members' partial tensors; every member gets the sum. Its gradient is the same on all.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// Forward: one all-reduce. Backward: none.
pub fn reduce_from<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::AllReduce, Move::Identity, group)
}

/// Keeps this member's share of the last dimension of a tensor that all members hold.
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

/// Joins the members' shares of the last dimension; every member gets the whole.
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

/// Keeps this member's share of the sequence of a tensor that all members hold.
///
/// # Shapes
/// `[n * s, ..]` to `[s, ..]`.
/// # Collective
/// Forward: none. Backward: one all-gather.
pub fn scatter_to_sequence<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Split { dim: 0 }, Move::AllGather { dim: 0 }, group)
}

/// Joins the sequence shards for a computation that is split over the group: each member's
/// gradient of the whole is partial, so backward sums them.
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

/// Joins the sequence shards for a computation that every member repeats: each member's gradient
/// is already whole, so backward only takes its share.
///
/// # Shapes
/// `[s, ..]` to `[n * s, ..]`.
/// # Collective
/// Forward: one all-gather. Backward: none.
pub fn gather_from_sequence_to_replicas<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x, Move::AllGather { dim: 0 }, Move::Split { dim: 0 }, group)
}

/// Sums the members' partial tensors and leaves each its share of the sequence.
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

/// The elementwise maximum over the members, on every member; NaN where any has it. Carries no
/// gradient: for statistics such as the row maximum of a softmax.
///
/// # Shapes
/// Any, unchanged.
/// # Collective
/// One all-reduce.
pub fn max_over<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    op::apply(x.inner(), Move::AllReduceMax, Move::Identity, group)
}

/// Cuts `split` into one share a member, sends each where it belongs and joins what arrives along
/// `concat`: heads to sequence and back.
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

/// Passes the tensor `by` places round the ring of members (negative: the other way).
///
/// # Shapes
/// Any, the same on all members; unchanged.
/// # Collective
/// Forward and backward: one send and one receive.
pub fn ring_shift<const D: usize>(x: Tensor<D>, by: isize, group: &Group) -> Tensor<D> {
    op::apply(x, Move::Shift { by }, Move::Shift { by: -by }, group)
}
