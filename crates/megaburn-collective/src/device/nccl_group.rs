//! A group's communicator, created on first use.

use std::{cell::RefCell, sync::Arc};

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use megaburn_cuda::{
    CudaError, CudaQueue,
    nccl::{Communicator, Membership, UniqueId},
};
use xxhash_rust::xxh3::xxh3_64;

use super::watched::Watched;
use crate::{
    call::{Call, Collective},
    deadline::Deadline,
    error::CollectiveError,
    fault::TransportError,
    group::Group,
    joined::joined,
    message::Payload,
    rank_context::RankContext,
};

/// A group on its GPUs.
#[derive(Debug)]
pub(crate) struct NcclGroup {
    /// Declared before `watching` in order to be closed before the watch ends.
    pub(super) communicator: Communicator,
    pub(super) watching: WatchHandle,
}

/// A group of the same members with a channel of its own, on which calls are counted and compared.
#[derive(Debug)]
pub(super) struct WatchHandle {
    pub(super) control: Group,
    pub(super) watched: Arc<Watched>,
}

impl Group {
    /// Returns the group's communicator, for tensors on the GPU of `like`.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members, at the first call; it waits for them.
    pub(super) fn device_side(&self, like: &CubeTensor) -> Result<&NcclGroup, CollectiveError> {
        if let Some(side) = self.0.device.get() {
            return Ok(side);
        }
        let made = self.make_device_side(like)?;
        Ok(self.0.device.get_or_init(|| made))
    }

    fn make_device_side(&self, like: &CubeTensor) -> Result<NcclGroup, CollectiveError> {
        let control = self.control(&format!("{} on GPUs", self.name()));
        let call = control.next_call(Collective::Broadcast { root: 0 }, DType::U8, &[0]);
        let made = control.run(&call, |link, deadline| {
            let failed = |why: String| control.device_error(&call, why);
            link.claim_gpu().map_err(failed)?;
            let queue = CudaQueue::of(like).ok_or_else(|| {
                failed(
                    "the tensor is not on a CUDA \
                device"
                        .into(),
                )
            })?;
            let id = control.share_id(link, &call, deadline)?;
            // Start a new deadline: a member that was compiling kernels may have arrived after the
            // first.
            let timeout = self.0.options.timeout;
            let deadline = Deadline::after(timeout);
            let communicator = control.join(link, &call, deadline, &queue, id)?;
            let name = control.name();
            let members = self.members().to_vec();
            // Digests arrive at any time, so each communicator gets its own channel. It is not
            // shared with a later communicator of a group of the same name and members.
            let channel = xxh3_64(&id.0);
            let watched = Watched::new(name, self.global_rank(), members, channel, timeout);
            let watched = Arc::new(watched);
            link.watch(&watched, &communicator)
                .map_err(|error| failed(error.to_string()))?;
            Ok((communicator, watched))
        });
        let (communicator, watched) = made?;
        Ok(NcclGroup {
            communicator,
            watching: WatchHandle { control, watched },
        })
    }

    /// Draws the communicator's id on member 0 and shares it with the others.
    fn share_id(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
    ) -> Result<UniqueId, CollectiveError> {
        let id = match self.rank() {
            0 => {
                UniqueId::new()
                    .map_err(|error| self.device_error(call, error.to_string()))?
                    .0
            }
            _ => [0; UniqueId::BYTES],
        };
        let bytes = joined([&id[..]].into_iter(), call.dtype);
        let id = self.given_by_root(link, call, deadline, Payload::new(bytes), 0)?;
        let id = id.as_slice().try_into();
        id.map(UniqueId)
            .map_err(|_| self.device_error(call, "rank 0 sent no communicator id".into()))
    }

    fn join(
        &self,
        link: &RankContext,
        call: &Call,
        deadline: Deadline,
        queue: &CudaQueue,
        id: UniqueId,
    ) -> Result<Communicator, CollectiveError> {
        let members = Membership {
            rank: self.rank(),
            size: self.size(),
        };
        let fault = RefCell::new(None);
        let end = || {
            let gone = link.transport.gone(self.global_rank());
            let late = || deadline.is_over().then_some(TransportError::Timeout);
            let why = gone.or_else(late)?;
            Some(format!("{:?}", fault.borrow_mut().insert(why)))
        };
        Communicator::join(queue, id, members, end).map_err(|error| match fault.take() {
            Some(TransportError::Timeout) => {
                let seconds = self.0.options.timeout.as_secs_f64();
                let why = format!(
                    "NCCL did not connect {} GPUs within {seconds:.1} s; set NCCL_DEBUG=INFO to \
                    see where it stopped",
                    members.size
                );
                self.device_error(call, why)
            }
            Some(lost) => self.transport_error(call, 0, lost, deadline.waited()),
            None => self.device_error(call, error.to_string()),
        })
    }

    pub(super) fn device_error(&self, call: &Call, why: String) -> CollectiveError {
        let rank = self.global_rank();
        let group = self.name().to_string();
        CollectiveError::Device {
            rank,
            group,
            call: Box::new(call.clone()),
            why,
        }
    }

    pub(super) fn cuda_error(&self, call: &Call, error: &CudaError) -> CollectiveError {
        self.device_error(call, error.to_string())
    }
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        if let Some(link) = &self.control.0.link {
            link.unwatch(&self.watched);
        }
    }
}
