use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use cubecl_common::device::DeviceId;

use crate::{
    CudaError, CudaQueue,
    context::Context,
    streams::{Priority, Stream},
};

/// A GPU's streams of copies, one a direction: it copies both ways at once. They are there for as long
/// as the process lives.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyStreams {
    pub(super) context: Context,
    /// From host memory.
    pub(super) inward: Stream,
    /// To host memory.
    pub(super) outward: Stream,
}

static LANES: Mutex<Option<HashMap<DeviceId, CopyStreams>>> = Mutex::new(None);

impl CopyStreams {
    /// Those of a GPU, made when they are first asked for.
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
