use std::{
    ffi::c_void,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys;

use super::copy_streams::CopyStreams;
use crate::{
    error::CudaError,
    events::{Event, PooledEvent},
    queue::RawBuffer,
    streams::Stream,
};

/// Pinned host memory, which the GPU reads and writes by itself while kernels run.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: Option<Memory>,
    lanes: CopyStreams,
    uses: Mutex<CopyRecord>,
}

/// The most recent copies to and from the memory.
#[derive(Debug, Default)]
struct CopyRecord {
    /// The event after the last copy to the memory.
    stored: Option<Arc<PooledEvent>>,
    /// The event after the last copy from the memory; all earlier ones precede it.
    fetched: Option<Arc<PooledEvent>>,
    /// The reason why the last copy to the memory failed.
    fault: Option<Arc<str>>,
    /// Whether a copy was started without an event recorded after it.
    is_unknown: bool,
}

/// Freed memory that copies in flight may still use.
#[derive(Debug)]
struct FreedBuffer {
    memory: Memory,
    lanes: CopyStreams,
    uses: CopyRecord,
}

/// Freed memory, for reuse by the next allocation of its size. It is returned to the system only
/// when memory runs out, because freeing waits for the whole GPU, including collectives that other
/// ranks may enter only after this one continues.
static FREE_LIST: Mutex<Vec<FreedBuffer>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Memory {
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: an address is the same on every thread; `Pinned` synchronizes the accesses to the memory.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Pinned {
    /// Allocates `bytes` bytes for the GPU of these streams.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub(super) fn new(lanes: CopyStreams, bytes: usize) -> Result<Self, CudaError> {
        let memory = match leftover_buffers(bytes) {
            Some(memory) => memory,
            None => Memory::new(lanes, bytes).or_else(|_| {
                free_leftover_buffers();
                Memory::new(lanes, bytes)
            })?,
        };
        Ok(Self {
            memory: Some(memory),
            lanes,
            uses: Mutex::default(),
        })
    }

    /// Enqueues a copy of the buffer to this memory and returns the event after it. The copy waits
    /// for the work on `stream` so far and for all copies from this memory. Call it on the device
    /// thread.
    ///
    /// # Errors
    /// The driver refuses.
    pub(super) fn store(
        &self,
        from: RawBuffer,
        stream: Stream,
    ) -> Result<Arc<PooledEvent>, CudaError> {
        let Memory { at, bytes } = *self.memory();
        let lane = self.lanes.outward;
        let mut uses = self.uses();
        assert!(
            from.bytes >= bytes as u64,
            "the tensor must be as long as its host memory"
        );
        lane.wait_for(stream)?;
        if let Some(fetched) = &uses.fetched {
            fetched.blocks_stream(lane)?;
        }
        uses.is_unknown = true;
        // SAFETY: both are `bytes` long. The buffer is not moved until CubeCL's stream has waited
        // for the copy (`Retained`), and the memory not freed until the copy is done (`Drop`). No
        // copy from the memory is in flight, and `HostTensor` prevents other threads from reading
        // it now.
        unsafe { sys::cuMemcpyDtoHAsync_v2(at, from.ptr, bytes, lane.0) }
            .result()
            .map_err(CudaError::driver("cuMemcpyDtoHAsync"))?;
        let stored = Arc::new(Event::record(lane)?);
        *uses = CopyRecord {
            stored: Some(stored.clone()),
            ..CopyRecord::default()
        };
        Ok(stored)
    }

    /// Enqueues a copy of this memory to the buffer and returns the event after it. The copy waits
    /// for the work on `stream` so far and for the last copy to this memory. Call it on the device
    /// thread.
    ///
    /// # Errors
    /// The driver refuses, or the last store failed.
    pub(super) fn fetch(
        &self,
        to: RawBuffer,
        stream: Stream,
    ) -> Result<Arc<PooledEvent>, CudaError> {
        let Memory { at, bytes } = *self.memory();
        let lane = self.lanes.inward;
        let mut uses = self.uses();
        assert!(
            to.bytes >= bytes as u64,
            "the tensor must be as long as its host memory"
        );
        lane.wait_for(stream)?;
        uses.stored()?.blocks_stream(lane)?;
        uses.is_unknown = true;
        // SAFETY: as in `store`; later writes to the memory wait for this copy.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to.ptr, at, bytes, lane.0) }
            .result()
            .map_err(CudaError::driver("cuMemcpyHtoDAsync"))?;
        let fetched = Arc::new(Event::record(lane)?);
        uses.fetched = Some(fetched.clone());
        uses.is_unknown = false;
        Ok(fetched)
    }

    /// Records that the memory does not hold the expected values.
    pub(super) fn fail(&self, why: &str) {
        self.uses().fault = Some(why.into());
    }

    /// Waits for the last store.
    ///
    /// # Errors
    /// The last store failed, or the driver reports an error, which any earlier work may have
    /// caused.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        let stored = self.uses().stored()?;
        self.lanes.context.scope(|| stored.wait())
    }

    /// The values of the last store.
    ///
    /// # Safety
    /// [`wait`](Self::wait) has succeeded since the last store, and nothing is stored while the slice
    /// is borrowed.
    pub(super) unsafe fn values(&self) -> &[u8] {
        let Memory { at, bytes } = *self.memory();
        // SAFETY: the memory is `bytes` long and lives as long as `self`. A copy that is over has
        // written it, and the caller guarantees that none writes to it now.
        unsafe { std::slice::from_raw_parts(at.cast_const().cast::<u8>(), bytes) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.memory().bytes
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("it is taken only in drop")
    }

    fn uses(&self) -> MutexGuard<'_, CopyRecord> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyRecord {
    fn stored(&self) -> Result<Arc<PooledEvent>, CudaError> {
        if let Some(why) = &self.fault {
            return Err(CudaError::Refused(why.to_string()));
        }
        let nothing =
            || CudaError::Refused("nothing has been copied to this host memory yet".to_string());
        self.stored.clone().ok_or_else(nothing)
    }

    /// Whether all copies are done; `false` if that is unknown.
    fn are_over(&self) -> bool {
        let is_done = |point: &Arc<PooledEvent>| point.is_done().unwrap_or(false);
        !self.is_unknown && self.stored.iter().chain(&self.fetched).all(is_done)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        let uses = std::mem::take(&mut *self.uses());
        let grave = FreedBuffer {
            memory,
            lanes: self.lanes,
            uses,
        };
        free_list().push(grave);
    }
}

impl Memory {
    fn new(lanes: CopyStreams, bytes: usize) -> Result<Self, CudaError> {
        let mut at = std::ptr::null_mut();
        // SAFETY: the driver writes the address through the pointer.
        let made = lanes
            .context
            .scope(|| Ok(unsafe { sys::cuMemHostAlloc(&mut at, bytes, 0) }))?;
        made.result().map_err(|error| CudaError::HostMemory {
            bytes,
            why: error.to_string(),
        })?;
        Ok(Self { at, bytes })
    }
}

fn free_list() -> MutexGuard<'static, Vec<FreedBuffer>> {
    FREE_LIST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes freed memory of this size that no copy uses any more.
fn leftover_buffers(bytes: usize) -> Option<Memory> {
    let mut free_list = free_list();
    let is_free = |FreedBuffer {
                       memory,
                       lanes,
                       uses,
                   }: &FreedBuffer| {
        memory.bytes == bytes && lanes.context.scope(|| Ok(uses.are_over())).unwrap_or(false)
    };
    let at = free_list.iter().position(is_free)?;
    Some(free_list.swap_remove(at).memory)
}

/// Returns freed memory to the system if no copy uses it any more.
fn free_leftover_buffers() {
    free_list().retain(
        |FreedBuffer {
             memory,
             lanes,
             uses,
         }| {
            let freed = lanes.context.scope(|| {
                if uses.are_over() {
                    // SAFETY: the memory is from `cuMemHostAlloc`, has no owner, and no copy uses
                    // it.
                    let freed = unsafe { sys::cuMemFreeHost(memory.at) };
                    return freed
                        .result()
                        .map(|()| true)
                        .map_err(CudaError::driver("cuMemFreeHost"));
                }
                Ok(false)
            });
            // Memory that cannot be freed is leaked.
            !freed.unwrap_or(true)
        },
    );
}
