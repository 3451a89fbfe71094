use std::{
    ffi::c_void,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys;

use super::copy_streams::CopyStreams;
use crate::{
    CudaError, RawBuffer,
    events::{Event, PooledEvent},
    streams::Stream,
};

/// Host memory that the GPU reads and writes by itself, beside its kernels.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: Option<Memory>,
    lanes: CopyStreams,
    uses: Mutex<CopyRecord>,
}

/// What copies there were.
#[derive(Debug, Default)]
struct CopyRecord {
    /// The point behind the last copy to the memory.
    stored: Option<Arc<PooledEvent>>,
    /// The point behind the last copy from it, which all others are before.
    fetched: Option<Arc<PooledEvent>>,
    /// Why the last copy to it did not come to be.
    fault: Option<Arc<str>>,
    /// Whether a copy was started that no point is known behind.
    is_unknown: bool,
}

/// Memory that copies may still use and nobody else does.
#[derive(Debug)]
struct FreedBuffer {
    memory: Memory,
    lanes: CopyStreams,
    uses: CopyRecord,
}

/// Memory that was let go, for the next of its size. It is not given back while the process has enough: that
/// waits for the whole GPU, so also for a collective that other ranks come to only after this one.
static FREE_LIST: Mutex<Vec<FreedBuffer>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Memory {
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: it is an address, which is the same on every thread; whose turn it is to access what is there
// `Pinned` says.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Pinned {
    /// So many bytes, for the GPU of these streams.
    ///
    /// # Errors
    /// There is no such memory.
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

    /// Puts a copy of the buffer into the memory, behind what is on `stream` by now and all copies from
    /// here; gives the point behind it. On the device thread.
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
            "a tensor is as long as its host memory"
        );
        lane.wait_for(stream)?;
        if let Some(fetched) = &uses.fetched {
            fetched.blocks_stream(lane)?;
        }
        uses.is_unknown = true;
        // SAFETY: both are `bytes` long; the buffer stays where it is until CubeCL's stream has waited
        // for the copy (`Retained`), and the memory until it is done (`Drop`). No copy from the memory
        // is under way, and `HostTensor` lets no thread read it now.
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

    /// Puts a copy of the memory into the buffer, behind what is on `stream` by now and the last copy to
    /// here; gives the point behind it. On the device thread.
    ///
    /// # Errors
    /// The driver refuses, or why there is nothing to copy.
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
            "a tensor is as long as its host memory"
        );
        lane.wait_for(stream)?;
        uses.stored()?.blocks_stream(lane)?;
        uses.is_unknown = true;
        // SAFETY: as in `store`; what is written to the memory next waits for this copy.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to.ptr, at, bytes, lane.0) }
            .result()
            .map_err(CudaError::driver("cuMemcpyHtoDAsync"))?;
        let fetched = Arc::new(Event::record(lane)?);
        uses.fetched = Some(fetched.clone());
        uses.is_unknown = false;
        Ok(fetched)
    }

    /// That the memory does not hold what it should.
    pub(super) fn fail(&self, why: &str) {
        self.uses().fault = Some(why.into());
    }

    /// What the last copy put there, which this thread waits for. Nobody may store meanwhile.
    ///
    /// # Errors
    /// Why there is nothing, or the driver's, which may be of any work before.
    pub(super) fn read(&self) -> Result<Vec<u8>, CudaError> {
        let stored = self.uses().stored()?;
        self.lanes.context.scope(|| stored.wait())?;
        let Memory { at, bytes } = *self.memory();
        // SAFETY: so many bytes are there, which the copy that was waited for has written; who stores
        // anew has this alone (`HostTensor::store`).
        Ok(unsafe { std::slice::from_raw_parts(at.cast_const().cast::<u8>(), bytes) }.to_vec())
    }

    pub(super) fn bytes(&self) -> usize {
        self.memory().bytes
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("only drop takes it")
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
        let nothing = || CudaError::Refused("nothing was copied to this host memory".to_string());
        self.stored.clone().ok_or_else(nothing)
    }

    /// Whether no copy goes on; `false` where that is not known.
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

/// Memory of that size that no copy uses any more.
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

/// Frees what copies are done with.
fn free_leftover_buffers() {
    free_list().retain(
        |FreedBuffer {
             memory,
             lanes,
             uses,
         }| {
            let freed = lanes.context.scope(|| {
                if uses.are_over() {
                    // SAFETY: it is from `cuMemHostAlloc`, nobody has it and no copy uses it.
                    let freed = unsafe { sys::cuMemFreeHost(memory.at) };
                    return freed
                        .result()
                        .map(|()| true)
                        .map_err(CudaError::driver("cuMemFreeHost"));
                }
                Ok(false)
            });
            // What cannot be freed is the process' for as long as it lives.
            !freed.unwrap_or(true)
        },
    );
}
