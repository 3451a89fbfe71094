use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use cubecl_common::device::DeviceId;

use crate::{
    context::Context,
    error::CudaError,
    queue::CudaQueue,
    streams::{Priority, Stream},
};

/// The copy streams of a GPU, one per direction, because it can copy in both directions at once.
/// They live as long as the process.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyStreams {
    pub(super) context: Context,
    /// The stream of copies from host to device.
    pub(super) inward: Stream,
    /// The stream of copies from device to host.
    pub(super) outward: Stream,
}

static LANES: Mutex<Option<HashMap<DeviceId, CopyStreams>>> = Mutex::new(None);

impl CopyStreams {
    /// The streams of a GPU; the first call creates them.
    ///
    /// # Errors
    /// The driver refuses.
    pub(super) fn of(queue: &CudaQueue) -> Result<Self, CudaError> {
        let mut all = LANES.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        let id = queue.device_id();
        if let Some(lanes) = all.get(&id) {
            return Ok(*lanes);
        }
        let context = Context::of(id)?;
        let [inward, outward] = context.scope(|| {
            Ok([
                Stream::create(Priority::Normal)?,
                Stream::create(Priority::Normal)?,
            ])
        })?;
        let lanes = Self {
            context,
            inward,
            outward,
        };
        all.insert(id, lanes);
        Ok(lanes)
    }
}
