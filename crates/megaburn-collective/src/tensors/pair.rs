//! Point-to-point transfers between two members.

use burn::tensor::{DType, Device, Tensor};

use crate::{
    call::Collective,
    error::CollectiveError,
    group::Group,
    lane::Lane,
    tensors::{kinds::CollectiveElement, start, work::Work},
};

/// Sends a tensor to member `to`, which calls [`recv`]. The tensor's memory stays in use until the
/// work is waited for.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// This rank and `to`. On GPUs, two members that send to each other at the same time hang: one of
/// them must receive first. The transfers of a group run one after the other, so members that
/// overlap both directions need one group per direction.
pub fn send<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    to: usize,
    group: &Group,
    lane: Lane,
) -> Result<Work<()>, CollectiveError> {
    let _ = lane;
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        return Ok(Work::started(group.gpu_send(x, to, lane)?, drop));
    }
    group.send(x.into_data(), to).map(Work::done)
}

/// Receives the next tensor that member `from` sends, which has this shape and type. On the host it
/// is received when this returns.
///
/// # Errors
/// See [`CollectiveError`]; on the host another shape or type is a mismatch. On GPUs a mismatch is
/// not detected.
/// # Collective
/// This rank and `from`; see [`send`].
pub fn recv<const D: usize, K: CollectiveElement>(
    shape: [usize; D],
    place: (&Device, DType),
    from: usize,
    group: &Group,
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    let _ = lane;
    // Only used to find the device; the received tensor gets memory of its own.
    #[cfg(feature = "cuda")]
    if let Some(one) = K::to_gpu(&Tensor::<1, K>::empty([1], place)) {
        let out = megaburn_cuda::tensor::empty(&one, shape, place.1);
        return Ok(Work::started(group.gpu_recv(out, from, lane)?, K::from_gpu));
    }
    let data = group.recv(from, Some(&shape), place.1)?;
    Ok(Work::done(Tensor::from_data(data, place)))
}

/// Connects the GPUs of a group's members, so that the first transfer does not have to. A no-op on
/// the host.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members. A rank that is in several groups calls this for them in the same order as its
/// peers.
pub fn rendezvous(device: &Device, group: &Group) -> Result<(), CollectiveError> {
    #[cfg(feature = "cuda")]
    if let Some(x) = burn::tensor::Float::to_gpu(&Tensor::<1>::empty([1], device)) {
        return group.gpu_rendezvous(&x);
    }
    let _ = (device, group);
    Ok(())
}

/// Sends the tensor to the member `by` places further in the ring of members (negative: backwards)
/// and receives the one that arrives.
///
/// # Shapes
/// Any, the same on all members; unchanged.
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members.
pub fn shift<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    by: isize,
    group: &Group,
    lane: Lane,
) -> Result<Work<Tensor<D, K>>, CollectiveError> {
    if group.at(by) == group.rank() {
        return Ok(Work::done(x));
    }
    start(Collective::Shift { by }, x, group, lane)
}
