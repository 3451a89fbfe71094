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

/// Names a communicator to be made; its first member draws it and tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; Self::BYTES]);

impl UniqueId {
    /// Its length.
    pub const BYTES: usize = 128;

    /// A new one.
    ///
    /// # Errors
    /// NCCL is missing, too old, or has no network to listen on.
    pub fn new() -> Result<Self, CudaError> {
        let api = Api::get()?;
        let mut id = ncclUniqueId {
            internal: [0; Self::BYTES],
        };
        // SAFETY: NCCL writes the name through the pointer.
        let code = unsafe { (api.get_unique_id)(&mut id) };
        if code != Code::SUCCESS {
            return Err(api.error("ncclGetUniqueId", code, None));
        }
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }
}

/// Which members a communicator has, and which of them this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// This process, from 0.
    pub rank: usize,
    /// All.
    pub size: usize,
}

/// The GPUs of some processes, one each, joined for collectives.
///
/// # Collective
/// All members make it and make the same calls in the same order. Dropping it closes it: waits up
/// to 5 s for the other members to do so too, unless something failed.
#[derive(Debug)]
pub struct Communicator {
    pub(super) calls: Arc<Calls>,
    pub(super) queue: CudaQueue,
    pub(super) members: Membership,
    side: OnceLock<Result<Stream, CudaError>>,
}

impl Communicator {
    /// Joins the members that know `id`, each with the GPU of its `queue`.
    ///
    /// `end` is asked every millisecond whether to go on waiting: `Some` says why not.
    ///
    /// # Errors
    /// NCCL is missing or too old, refuses (two members on one GPU), or `end`'s reason.
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

    /// Which members it has.
    pub fn members(&self) -> Membership {
        self.members
    }

    /// The stream of overlapped calls.
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
            self.calls.abort("its rank ended early");
            self.calls.await_end();
        } else {
            // What was enqueued before uses the communicator: let it be made first.
            let _ = self.queue.on_device_thread(|| Ok(()));
            self.calls.close();
        }
        if let Some(Ok(side)) = self.side.get() {
            let _ = self.calls.context().scope(|| side.destroy());
        }
    }
}
