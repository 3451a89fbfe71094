//! Measures how long the device takes for some work, with the device's own clock.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUevent};

use crate::{
    error::CudaError,
    queue::{CudaQueue, Op},
    streams::Stream,
};

/// The milliseconds on the device that the work takes that `work` submits to `queue`. Waits for it.
/// Host time does not count as long as the device is busy.
///
/// # Errors
/// A driver error, which the work may have caused.
pub fn elapsed(queue: &CudaQueue, work: impl FnOnce()) -> Result<f32, CudaError> {
    let timer = Arc::new(Mutex::new(None));
    let mark = |what: &'static str, point: fn(&Timer, Stream) -> Result<(), CudaError>| {
        let timer = timer.clone();
        queue.enqueue(Op::new(move || what.into()), move |stream, _| {
            let mut timer = timer.lock().unwrap_or_else(PoisonError::into_inner);
            let timer = match &*timer {
                Some(timer) => timer,
                None => timer.insert(Timer::new()?),
            };
            point(timer, stream)
        });
    };
    mark("start of a timing", Timer::start);
    work();
    mark("end of a timing", Timer::stop);
    queue.on_device_thread(
        || match &*timer.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(timer) => timer.milliseconds(),
            None => Err(CudaError::Refused(
                "the device thread has no stream to time yet".into(),
            )),
        },
    )
}

/// Two events in a stream.
pub(crate) struct Timer([Handle; 2]);

struct Handle(CUevent);

// SAFETY: an event handle is a name that the driver accepts from every thread.
unsafe impl Send for Handle {}

impl Timer {
    pub(crate) fn new() -> Result<Self, CudaError> {
        let create = || {
            let mut event = std::ptr::null_mut();
            // SAFETY: the driver writes the new handle through the pointer.
            let status = unsafe { sys::cuEventCreate(&mut event, 0) };
            status
                .result()
                .map_err(CudaError::driver("cuEventCreate"))
                .map(|()| Handle(event))
        };
        Ok(Self([create()?, create()?]))
    }

    pub(crate) fn start(&self, stream: Stream) -> Result<(), CudaError> {
        self.record(0, stream)
    }

    pub(crate) fn stop(&self, stream: Stream) -> Result<(), CudaError> {
        self.record(1, stream)
    }

    fn record(&self, which: usize, stream: Stream) -> Result<(), CudaError> {
        // SAFETY: event and stream are live handles of this context.
        unsafe { sys::cuEventRecord(self.0[which].0, stream.0) }
            .result()
            .map_err(CudaError::driver("cuEventRecord"))
    }

    /// The time between the two events; waits for the second.
    pub(crate) fn milliseconds(&self) -> Result<f32, CudaError> {
        let [start, end] = [self.0[0].0, self.0[1].0];
        let mut milliseconds = 0.0;
        // SAFETY: both events are live handles and were recorded.
        unsafe {
            sys::cuEventSynchronize(end)
                .result()
                .and_then(|()| sys::cuEventElapsedTime_v2(&mut milliseconds, start, end).result())
        }
        .map_err(CudaError::driver("cuEventElapsedTime"))?;
        Ok(milliseconds)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        for event in &self.0 {
            // SAFETY: this value owns the events.
            let _ = unsafe { sys::cuEventDestroy_v2(event.0) };
        }
    }
}
