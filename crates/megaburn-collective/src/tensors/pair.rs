//! Point-to-point transfers between two members.

use std::marker::PhantomData;

use burn::tensor::{DType, Device, Shape, Tensor};
#[cfg(feature = "cuda")]
use megaburn_cuda::{AsyncOp, nccl::Lane};

use super::{AsyncCollective, CollectiveElement};
use crate::{CollectiveError, Group};

/// Sends a tensor to member `to`, which calls [`recv`].
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// This rank and `to`. On GPUs, two members that send to each other at the same time hang: one of
/// them must receive first.
pub fn send<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    to: usize,
    group: &Group,
) -> Result<(), CollectiveError> {
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        return group.gpu_send(x, to, Lane::InOrder).map(drop);
    }
    group.send(x.into_data(), to)
}

/// Receives the next tensor that member `from` sends. `like` gives its shape and device; the values
/// of `like` do not matter.
///
/// # Errors
/// See [`CollectiveError`]; on the host another shape or type is a mismatch. On GPUs a mismatch is
/// not detected.
/// # Collective
/// This rank and `from`.
pub fn recv<const D: usize, K: CollectiveElement>(
    like: Tensor<D, K>,
    from: usize,
    group: &Group,
) -> Result<Tensor<D, K>, CollectiveError> {
    #[cfg(feature = "cuda")]
    if let Some(like) = K::to_gpu(&like) {
        let out = megaburn_cuda::tensor::empty(&like, like.meta.shape().clone(), like.dtype);
        return group
            .gpu_recv(out, from, Lane::InOrder)
            .map(|came| K::from_gpu(came.wait()));
    }
    let (shape, device, dtype): (Shape, Device, _) = (like.shape(), like.device(), like.dtype());
    let data = group.recv(from, Some(shape.as_slice()), dtype)?;
    Ok(Tensor::from_data(data, (&device, dtype)))
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

/// Starts sending the tensor to the member `by` places further in the ring of members (negative:
/// backwards) and receiving the one that arrives; both overlap with the kernels that follow. On the
/// host both are complete when this returns.
///
/// # Shapes
/// Any, the same on all members; unchanged.
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members.
pub fn start_shift<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    by: isize,
    group: &Group,
) -> Result<AsyncCollective<D, K>, CollectiveError> {
    if group.at(by) == group.rank() {
        return Ok(AsyncCollective::done(x));
    }
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        return group
            .gpu_shift(x, by, Lane::Overlapped)
            .map(AsyncCollective::started);
    }
    let like = (x.shape(), x.device(), x.dtype());
    group.send(x.into_data(), group.at(by))?;
    let (shape, device, dtype) = like;
    let data = group.recv(group.at(-by), Some(shape.as_slice()), dtype)?;
    Ok(AsyncCollective::done(Tensor::from_data(
        data,
        (&device, dtype),
    )))
}

/// A tensor that is being sent to another member. Its memory stays in use until this is dropped. On
/// a GPU, kernels enqueued after the drop wait for the transfer; the host does not.
#[derive(Debug)]
#[must_use = "dropping it waits for the send"]
pub struct Sending {
    #[cfg(feature = "cuda")]
    _started: Option<AsyncOp>,
}

/// Like [`send`], but overlaps with the kernels that follow. On the host it is complete when this
/// returns.
///
/// # Errors
/// As [`send`].
/// # Collective
/// As [`send`]. The transfers of a group run one after the other, so two members that send to each
/// other at the same time need one group per direction.
pub fn start_send<const D: usize, K: CollectiveElement>(
    x: Tensor<D, K>,
    to: usize,
    group: &Group,
) -> Result<Sending, CollectiveError> {
    #[cfg(feature = "cuda")]
    if let Some(x) = K::to_gpu(&x) {
        let started = group.gpu_send(x, to, Lane::Overlapped)?;
        return Ok(Sending {
            _started: Some(started),
        });
    }
    send(x, to, group)?;
    Ok(Sending {
        #[cfg(feature = "cuda")]
        _started: None,
    })
}

/// A tensor that may be in flight from another member.
#[derive(Debug)]
#[must_use = "call `wait` to get the tensor"]
pub struct Receiving<const D: usize, K: CollectiveElement>(ReceiveState<D>, PhantomData<K>);

#[cfg_attr(
    feature = "cuda",
    allow(
        clippy::large_enum_variant,
        reason = "few receives are in flight at a time"
    )
)]
#[derive(Debug)]
enum ReceiveState<const D: usize> {
    /// On the host nothing is allocated in advance: [`Receiving::wait`] receives the tensor.
    Later {
        shape: [usize; D],
        place: (Device, DType),
        from: usize,
        group: Group,
    },
    #[cfg(feature = "cuda")]
    Started(AsyncOp),
}

/// Like [`recv`], but for a tensor that the member may send later: `shape` and `place` give its
/// shape, device and type. Overlaps with the kernels that follow.
///
/// # Errors
/// As [`recv`].
/// # Collective
/// As [`start_send`].
pub fn start_recv<const D: usize, K: CollectiveElement>(
    shape: [usize; D],
    place: (&Device, DType),
    from: usize,
    group: &Group,
) -> Result<Receiving<D, K>, CollectiveError> {
    // Only used to find the device; the received tensor gets memory of its own.
    #[cfg(feature = "cuda")]
    if let Some(one) = K::to_gpu(&Tensor::<1, K>::empty([1], place)) {
        let out = megaburn_cuda::tensor::empty(&one, shape, place.1);
        let started = group.gpu_recv(out, from, Lane::Overlapped)?;
        return Ok(Receiving(ReceiveState::Started(started), PhantomData));
    }
    let place = (place.0.clone(), place.1);
    Ok(Receiving(
        ReceiveState::Later {
            shape,
            place,
            from,
            group: group.clone(),
        },
        PhantomData,
    ))
}

impl<const D: usize, K: CollectiveElement> Receiving<D, K> {
    /// Whether the transfer is already running, so that it need not be waited for before its result
    /// is needed.
    pub fn is_started(&self) -> bool {
        !matches!(self.0, ReceiveState::Later { .. })
    }

    /// Returns the tensor. On a GPU, kernels enqueued from now on wait for it; the host does not.
    ///
    /// # Errors
    /// As [`recv`].
    pub fn wait(self) -> Result<Tensor<D, K>, CollectiveError> {
        match self.0 {
            ReceiveState::Later {
                shape,
                place: (device, dtype),
                from,
                group,
            } => {
                let data = group.recv(from, Some(&shape), dtype)?;
                Ok(Tensor::from_data(data, (&device, dtype)))
            }
            #[cfg(feature = "cuda")]
            ReceiveState::Started(started) => Ok(K::from_gpu(started.wait())),
        }
    }
}
