use std::{
    sync::{Arc, OnceLock},
    thread,
};

use super::{
    api::Api,
    calls::Calls,
    handles::Handles,
    membership::{Membership, UniqueId},
};
use crate::{
    context::Context,
    error::CudaError,
    queue::CudaQueue,
    streams::{Priority, Stream},
};

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
