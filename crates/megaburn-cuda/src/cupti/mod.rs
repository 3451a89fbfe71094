//! Records the kernels and copies of this process's GPU by CUPTI's activity API.

mod api;
mod records;

use std::{
    alloc::{Layout, alloc, dealloc},
    ffi::c_void,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use cudarc::driver::sys;

use crate::{error::CudaError, queue::CudaQueue};
use api::{Api, Code};
use records::Names;

pub use records::{GpuWork, WorkKind};

/// The kinds of records that are asked for.
const KINDS: [u32; 4] = [
    records::KERNEL,
    records::MEMCPY,
    records::MEMSET,
    records::MEMCPY_PEER,
];
/// The length of a buffer, as in NVIDIA's examples.
const BUFFER: usize = 8 << 20;
/// How far a record may be outside of the trace by the clock that it has, in nanoseconds.
const SLACK: u64 = 10_000_000_000;
/// Delivers buffers that are not full, too: `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`.
const FORCED: u32 = 1;

/// The clock of the trace, in nanoseconds.
static CLOCK: OnceLock<fn() -> u64> = OnceLock::new();
/// What CUPTI has delivered so far.
static DELIVERED: Mutex<Option<Delivered>> = Mutex::new(None);

#[derive(Debug, Default)]
struct Delivered {
    work: Vec<GpuWork>,
    names: Names,
}

/// What a GPU did during a trace.
#[derive(Clone, Debug, Default)]
pub struct GpuActivity {
    /// Its kernels, copies and fills, in the order of their starts.
    pub work: Vec<GpuWork>,
    /// The number of records that CUPTI had no room for.
    pub dropped: usize,
}

/// Records what the GPU of this process does, until it is [finished](Self::finish). A process has
/// one at a time.
#[derive(Debug)]
pub struct GpuTrace {
    api: &'static Api,
    clock: fn() -> u64,
    /// When it began.
    began: u64,
    /// What to add to CUPTI's own clock to get that of the trace.
    offset: i64,
}

impl GpuTrace {
    /// Begins to record. `clock` is read by CUPTI, so that records have its times: it must not
    /// panic, and is that of the first trace of the process.
    ///
    /// # Errors
    /// CUPTI is missing or of an unknown version, or another profiler uses it.
    pub fn begin(clock: fn() -> u64) -> Result<Self, CudaError> {
        let api = Api::get()?;
        {
            let mut delivered = delivered();
            if delivered.is_some() {
                let why = "another trace of this process has not ended";
                return Err(CudaError::Refused(why.into()));
            }
            *delivered = Some(Delivered::default());
        }
        // A failure below ends the trace again.
        let mut trace = Self {
            api,
            clock,
            began: clock(),
            offset: 0,
        };
        if CLOCK.set(clock).is_ok() {
            // SAFETY: the function lives as long as the process, takes nothing and does not panic.
            let code = unsafe { (api.register_timestamp)(timestamp) };
            if let Err(error) = api.check("cuptiActivityRegisterTimestampCallback", code) {
                tracing::warn!("kernels are moved to the clock of the host: {error}");
            }
            // SAFETY: the functions live as long as the process and follow CUPTI's contract.
            let code = unsafe { (api.register_callbacks)(requested, completed) };
            api.check("cuptiActivityRegisterCallbacks", code)?;
        }
        let mut time = 0;
        // SAFETY: the library writes the number through the pointer.
        let code = unsafe { (api.get_timestamp)(&mut time) };
        api.check("cuptiGetTimestamp", code)?;
        trace.offset = (clock() as i64).wrapping_sub(time as i64);
        for kind in KINDS {
            // SAFETY: the kinds exist in all known versions.
            let code = unsafe { (api.enable)(kind) };
            api.check("cuptiActivityEnable", code)?;
        }
        Ok(trace)
    }

    /// Waits for the work so far, and returns what was recorded.
    ///
    /// # Errors
    /// The device has failed, or CUPTI refuses.
    pub fn finish(self, queue: &CudaQueue) -> Result<GpuActivity, CudaError> {
        queue.on_device_thread(|| {
            // SAFETY: the context is current.
            unsafe { sys::cuCtxSynchronize() }
                .result()
                .map_err(CudaError::driver("cuCtxSynchronize"))
        })?;
        // SAFETY: it takes no memory of ours, and calls `completed` for every buffer.
        let code = unsafe { (self.api.flush_all)(FORCED) };
        self.api.check("cuptiActivityFlushAll", code)?;
        let mut dropped = 0;
        // SAFETY: no context means all of them; the library writes through the pointer.
        let code = unsafe { (self.api.num_dropped)(std::ptr::null_mut(), 0, &mut dropped) };
        self.api.check("cuptiActivityGetNumDroppedRecords", code)?;
        let Delivered { mut work, .. } = delivered().take().unwrap_or_default();
        // If CUPTI did not read the clock of the trace, the records have its own.
        let last = (self.clock)() + SLACK;
        let is_inside =
            |work: &GpuWork| (self.began.saturating_sub(SLACK)..last).contains(&work.start);
        if !work.get(work.len() / 2).is_none_or(is_inside) {
            for work in &mut work {
                work.start = work.start.wrapping_add_signed(self.offset);
                work.end = work.end.wrapping_add_signed(self.offset);
            }
        }
        work.sort_by_key(|work| (work.start, work.end));
        Ok(GpuActivity { work, dropped })
    }
}

impl Drop for GpuTrace {
    fn drop(&mut self) {
        for kind in KINDS {
            // SAFETY: the kinds exist in all known versions. A kind that was not enabled is an
            // error of the call without consequences.
            let _ = unsafe { (self.api.disable)(kind) };
        }
        delivered().take();
    }
}

fn delivered() -> MutexGuard<'static, Option<Delivered>> {
    // A panic leaves the list consistent.
    DELIVERED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout() -> Layout {
    Layout::new::<[u64; BUFFER / size_of::<u64>()]>()
}

unsafe extern "C" fn timestamp() -> u64 {
    CLOCK.get().map_or(0, |clock| clock())
}

unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the layout is not empty.
    let memory = unsafe { alloc(layout()) };
    // SAFETY: CUPTI passes three addresses to write to. A null buffer of length 0 is one that is
    // not there: CUPTI then counts the records that it drops.
    unsafe {
        *buffer = memory;
        *size = if memory.is_null() { 0 } else { BUFFER };
        *max_records = 0;
    }
}

unsafe extern "C" fn completed(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    if let Ok(api) = Api::get()
        && let Some(delivered) = &mut *delivered()
    {
        let mut record: *mut u8 = std::ptr::null_mut();
        // SAFETY: the buffer has this many valid bytes, and the call walks through its records.
        while unsafe { (api.next_record)(buffer, valid, &mut record) } == Code::SUCCESS {
            // SAFETY: CUPTI returned the record, which is in the buffer.
            let work = unsafe { records::read(record, &mut delivered.names) };
            delivered.work.extend(work);
        }
    }
    // SAFETY: `requested` allocated it with this layout, and CUPTI does not use it any more.
    unsafe { dealloc(buffer, layout()) };
}
