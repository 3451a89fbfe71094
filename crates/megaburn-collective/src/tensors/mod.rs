//! Collectives on tensors, without gradients: for optimizers, trainers and other code outside of
//! layers.
//!
//! Tensors on a CUDA device go from GPU to GPU through NCCL, without blocking the host; all others
//! go through the group's host transport. Tensors must be off the autodiff device (`.inner()`). A
//! failure on the GPU shows up later: check [`crate::Group::failure`] after reading a value from
//! the GPU and before trusting it.
//!
//! The `start_` functions overlap a collective with the kernels that follow it, until its
//! [`AsyncCollective`] is waited for. On the host they are complete when they return.

mod async_collective;
mod in_place;
mod kinds;
mod pair;
mod rows;

use std::ops::Range;

pub use async_collective::AsyncCollective;
use async_collective::Lane;
use burn::tensor::{Tensor, TensorData};
pub use in_place::start_all_gather_in_place;
pub use kinds::CollectiveElement;
pub use pair::{Receiving, Sending, recv, rendezvous, send, start_recv, start_send, start_shift};
use rows::stretches;

use crate::{CollectiveError, Group, ReduceOp};

/// Reduces the members' tensors; every member gets the result.
///
/// On GPUs, a maximum of floats propagates NaN as on the host, at the cost of sending twice the
/// data; a mean divides each value before adding.
///
/// # Shapes
/// Any, the same on every member; the result has the same shape.
/// # Errors
/// See [`CollectiveError`]; a mean of integers is refused.
/// # Collective
/// All members.
pub fn all_reduce<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    all_reduce_on(x, op, group, Lane::InOrder).map(AsyncCollective::wait)
}

/// Like [`all_reduce`], but overlaps with the kernels that follow.
///
/// # Errors
/// As [`all_reduce`].
/// # Collective
/// All members.
pub fn start_all_reduce<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    all_reduce_on(x, op, group, Lane::Overlapped)
}

fn all_reduce_on<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
    lane: Lane,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| kinds::all_reduce_on_gpu(x, op, group, lane),
        |x| group.all_reduce(x, op),
    )
}

/// Concatenates the members' tensors along the first dimension; every member gets the full tensor.
///
/// # Shapes
/// `[d, ..]`, the same on every member, to `[size * d, ..]`.
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members.
pub fn all_gather<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    all_gather_on(x, group, Lane::InOrder).map(AsyncCollective::wait)
}

/// Like [`all_gather`], but overlaps with the kernels that follow.
///
/// # Errors
/// As [`all_gather`].
/// # Collective
/// All members.
pub fn start_all_gather<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    all_gather_on(x, group, Lane::Overlapped)
}

fn all_gather_on<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    group: &Group,
    lane: Lane,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.gpu_all_gather(x, lane),
        |x| group.all_gather(x),
    )
}

/// Reduces the members' tensors and gives each member its shard of the first dimension. On GPUs a
/// maximum of floats **drops NaN** where not all members have it.
///
/// # Shapes
/// `[size * d, ..]`, the same on every member, to `[d, ..]`.
/// # Errors
/// See [`CollectiveError`]; a first dimension that the members do not divide is refused.
/// # Collective
/// All members.
pub fn reduce_scatter<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    reduce_scatter_on(x, op, group, Lane::InOrder).map(AsyncCollective::wait)
}

/// Like [`reduce_scatter`], but overlaps with the kernels that follow.
///
/// # Errors
/// As [`reduce_scatter`].
/// # Collective
/// All members.
pub fn start_reduce_scatter<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    reduce_scatter_on(x, op, group, Lane::Overlapped)
}

fn reduce_scatter_on<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    op: ReduceOp,
    group: &Group,
    lane: Lane,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.gpu_reduce_scatter(x, op, lane),
        |x| group.reduce_scatter(x, op),
    )
}

/// Every member gets the tensor of member `root`.
///
/// # Shapes
/// Any, the same on every member.
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members.
pub fn broadcast<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    root: usize,
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    let done = run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.gpu_broadcast(x, root, Lane::InOrder),
        |x| group.broadcast(x, root),
    );
    done.map(AsyncCollective::wait)
}

/// Sends `send[i]` consecutive rows to member `i` and concatenates the `recv[i]` rows that arrive
/// from each member `i`. Counts may be zero.
///
/// # Shapes
/// `[sum of send, ..]` to `[sum of recv, ..]`.
/// # Errors
/// See [`CollectiveError`]; counts that do not fit the tensor or, on the host, the received data.
/// On GPUs the members' counts are not compared: exchange them first ([`Group::all_to_all`]).
/// # Collective
/// All members; `recv[i]` here must equal the row count that member `i` sends here.
pub fn all_to_all<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    send: &[usize],
    recv: &[usize],
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    let [send, recv] = [send, recv].map(stretches);
    all_to_all_on(x, [&send, &recv], group, Lane::InOrder).map(AsyncCollective::wait)
}

/// Like [`all_to_all`], but overlaps with the kernels that follow.
///
/// # Errors
/// As [`all_to_all`].
/// # Collective
/// All members.
pub fn start_all_to_all<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    send: &[usize],
    recv: &[usize],
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    let [send, recv] = [send, recv].map(stretches);
    start_all_to_all_between(x, &send, &recv, group)
}

/// Like [`start_all_to_all`], on arbitrary row ranges. `send[i]` are the row ranges of `x` that go
/// to member `i`, in the order in which they are sent; `recv[i]` are the row ranges of the result
/// that the ranges from member `i` become, one by one.
///
/// On GPUs each range is one message. A group of one returns its input unchanged, so `send` and
/// `recv` must then be equal.
///
/// # Shapes
/// `[rows of all send, ..]` to `[rows of all recv, ..]`
/// # Errors
/// As [`all_to_all`]; also if the ranges do not cover each row exactly once.
/// # Collective
/// All members; the ranges in `recv[i]` here must have the same lengths, one by one, as those that
/// member `i` sends here.
pub fn start_all_to_all_between<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    send: &[Vec<Range<usize>>],
    recv: &[Vec<Range<usize>>],
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    all_to_all_on(x, [send, recv], group, Lane::Overlapped)
}

fn all_to_all_on<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    [send, recv]: [&[Vec<Range<usize>>]; 2],
    group: &Group,
    lane: Lane,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.gpu_all_to_all(x, send, recv, lane),
        |x| group.all_to_all_rows(x, send, recv),
    )
}

/// Runs on the GPU if the tensor is there, else through the host; does nothing in a group of one.
fn run<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    group: &Group,
    #[cfg(feature = "cuda")] on_gpu: impl FnOnce(
        burn_cubecl::tensor::CubeTensor,
    ) -> Result<megaburn_cuda::AsyncOp, CollectiveError>,
    on_host: impl FnOnce(TensorData) -> Result<TensorData, CollectiveError>,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    if group.size() == 1 {
        return Ok(AsyncCollective::done(x));
    }
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        return on_gpu(x).map(AsyncCollective::started);
    }
    let device = x.device();
    let dtype = x.dtype();
    let data = on_host(x.into_data())?;
    Ok(AsyncCollective::done(Tensor::from_data(
        data,
        (&device, dtype),
    )))
}

#[cfg(test)]
mod tests;
