//! Collectives on tensors, without gradients: for optimizers, trainers and other code outside of
//! layers.
//!
//! Tensors on a CUDA device go from GPU to GPU through NCCL, without blocking the host; all others
//! go through the group's host transport. Tensors must be off the autodiff device (`.inner()`). A
//! failure on the GPU shows up later: check [`Group::failure`] after reading a value from the GPU
//! and before trusting it.
//!
//! Each function starts its collective and returns [`Work`] to wait for. With
//! [`Lane::Overlapped`] the collective overlaps with the kernels that follow, until then. On the
//! host it is complete when the function returns.

mod in_place;
mod kinds;
mod pair;
mod rows;
mod work;

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
pub use in_place::all_gather_in_place;
pub use kinds::CollectiveElement;
pub use pair::{recv, rendezvous, send, shift};
use rows::consecutive_ranges;
pub use work::Work;

use crate::{
    call::{Collective, ReduceOp},
    error::CollectiveError,
    group::Group,
    lane::Lane,
};

/// Reduces the members' tensors; every member gets the result.
///
/// On GPUs, a maximum of floats propagates NaN as on the host, at the cost of sending twice the
/// data and of the overlap; a mean divides each value before adding.
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
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    start(Collective::AllReduce(op), x, group, lane)
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
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    start(Collective::AllGather, x, group, lane)
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
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    start(Collective::ReduceScatter(op), x, group, lane)
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
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    start(Collective::Broadcast { root }, x, group, lane)
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
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    let [send, recv] = [send, recv].map(consecutive_ranges);
    all_to_all_ranges(x, &send, &recv, group, lane)
}

/// Like [`all_to_all`], on arbitrary row ranges. `send[i]` are the row ranges of `x` that go to
/// member `i`, in the order in which they are sent; `recv[i]` are the row ranges of the result that
/// the ranges from member `i` become, one by one.
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
pub fn all_to_all_ranges<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    send: &[Vec<Range<usize>>],
    recv: &[Vec<Range<usize>>],
    group: &Group,
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.gpu_all_to_all(x, send, recv, lane),
        |x| group.all_to_all_rows(x, send, recv),
    )
}

/// Starts a collective to which each member gives one tensor.
fn start<const D: usize, K: CollectiveElement>(
    op: Collective,
    x: Tensor<D, K>,
    group: &Group,
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    let _ = lane;
    run(
        x,
        group,
        #[cfg(feature = "cuda")]
        |x| group.start_on_gpu(op, x, lane),
        |x| group.run_on_host(op, x),
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
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    if group.size() == 1 {
        return Ok(Work::done(x));
    }
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        return Ok(Work::started(on_gpu(x)?, K::from_gpu));
    }
    let place = (&x.device(), x.dtype());
    let data = on_host(x.into_data())?;
    Ok(Work::done(Tensor::from_data(data, place)))
}

#[cfg(test)]
mod tests;
