use std::{
    sync::{Arc, OnceLock},
    thread,
};

use cudarc::nccl::sys::ncclUniqueId;

use super::{
    api::{Api, Code},
    calls::Calls,
    handles::Handles,
};
use crate::{
    CudaError, CudaQueue,
    context::Context,
    streams::{Priority, Stream},
};

/// Identifies a communicator to be created; its first member generates the id and sends it to the
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; Self::BYTES]);

impl UniqueId {
    /// Length in bytes.
    pub const BYTES: usize = 128;

    /// Generates a new id.
    ///
    /// # Errors
    /// NCCL is missing, too old, or has no network to listen on.
    pub fn new() -> Result<Self, CudaError> {
        let api = Api::get()?;
        let mut id = ncclUniqueId {
            internal: [0; Self::BYTES],
        };
        // SAFETY: NCCL writes the id through the pointer.
        let code = unsafe { (api.get_unique_id)(&mut id) };
        if code != Code::SUCCESS {
            return Err(api.error("ncclGetUniqueId", code, None));
        }
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }
}

/// The number of members of a communicator, and the rank of this process among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The number of members.
    pub size: usize,
}

/// A communicator over several processes, each with one GPU.
///
/// # Collective
/// All members create it together and make the same calls in the same order. Dropping it closes it:
/// it waits up to 5 s for the other members to do so, unless something failed.
#[derive(Debug)]
pub struct Communicator {
    pub(super) calls: Arc<Calls>,
    pub(super) queue: CudaQueue,
    pub(super) members: Membership,
    side: OnceLock<Result<Stream, CudaError>>,
}

impl Communicator {
    /// Joins the members that have the same `id`, each with the GPU of its `queue`.
    ///
    /// `end` is called every millisecond; if it returns a reason, joining is given up.
    ///
    /// # Errors
    /// NCCL is missing, too old or refuses (e.g. two members on one GPU), or `end` returned a
    /// reason.
    pub fn join(
        queue: &CudaQueue,
        id: UniqueId,
        members: Membership,
        end: impl Fn() -> Option<String>,
    ) -> Result<Self, CudaError> {
        let api = Api::get()?;
        let context = Context::of(queue.device_id())?;
        let handles = context.scope(|| Handles::join(api, context, id, members, &end))?;
        let calls = Arc::new(Calls::new(handles));
        let queue = queue.clone();
        Ok(Self {
            calls,
            queue,
            members,
            side: OnceLock::new(),
        })
    }

    /// The number of members and this process's rank.
    pub fn members(&self) -> Membership {
        self.members
    }

    /// The stream of overlapped calls, created on first use.
    pub(super) fn side_stream(&self) -> Result<Stream, CudaError> {
        let create = || {
            self.calls
                .context()
                .scope(|| Stream::create(Priority::High))
        };
        self.side.get_or_init(create).clone()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if thread::panicking() || self.calls.is_over() {
            self.calls
                .abort("its rank ended before its calls were done");
            self.calls.await_end();
        } else {
            // Calls that were enqueued before still use the communicator, so they must be made
            // first.
            let _ = self.queue.on_device_thread(|| Ok(()));
            self.calls.close();
        }
        if let Some(Ok(side)) = self.side.get() {
            let _ = self.calls.context().scope(|| side.destroy());
        }
    }
}
