use std::{
    any::Any,
    cell::RefCell,
    collections::HashMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
};

use burn::{backend::DispatchDevice, prelude::Device};
use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use cubecl::{
    cuda::CudaRuntime,
    server::{BufferBinding, Handle, ServerError, ServerStorage},
};
use cubecl_common::{
    device::{Device as _, DeviceId},
    device_handle::DeviceHandle,
};
use cubecl_environment::{backtrace::BackTrace, stream::StreamId};
use cubecl_server::{
    runtime::Runtime,
    storage::{ComputeStorage, ManagedResource},
    stream::{ExecuteScope, ScopedOutcome, WriteScoped, failed_writing},
};

use crate::{CudaError, streams::Stream};

/// CubeCL's CUDA server, which lives on its device's thread.
pub type Server = <CudaRuntime as Runtime>::Server;

type Resource = ManagedResource<<<Server as ServerStorage>::Storage as ComputeStorage>::Resource>;

/// The device thread of one GPU and this rank's stream on it.
#[derive(Clone)]
pub struct CudaQueue {
    device: DeviceHandle<Server>,
    stream: StreamId,
}

/// Told why work failed.
type Hook = Box<dyn FnOnce(&str) + Send>;

/// What a piece of work is and which buffers it touches.
pub struct Op {
    describe: Box<dyn Fn() -> String + Send>,
    on_failure: Option<Hook>,
    /// Whose tensors nothing is computed in the place of until the work is done.
    reads: Vec<Handle>,
    /// Not their handles: what comes behind the work may be computed in their place.
    writes: Vec<BufferBinding>,
}

/// A buffer's place in device memory, valid while the work that it was given to is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBuffer {
    /// Its first byte; the offset of a slice is counted in.
    pub ptr: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The buffers of an [`Op`], in the order in which they were named.
#[derive(Debug)]
pub struct Buffers {
    /// What the work reads.
    pub reads: Vec<RawBuffer>,
    /// What the work writes, or reads and writes.
    pub writes: Vec<RawBuffer>,
}

impl Op {
    /// Work that `describe` names, with its shapes: it is asked only if the work fails.
    pub fn new(describe: impl Fn() -> String + Send + 'static) -> Self {
        let reads = Vec::new();
        let writes = Vec::new();
        Self {
            describe: Box::new(describe),
            on_failure: None,
            reads,
            writes,
        }
    }

    /// Calls `hook` on the device thread with the reason if the work fails, or cannot run because a
    /// buffer that it reads was never written: for work that others wait for.
    pub fn on_failure(mut self, hook: impl FnOnce(&str) + Send + 'static) -> Self {
        self.on_failure = Some(Box::new(hook));
        self
    }

    /// A tensor's buffer that the work reads.
    pub fn reads(mut self, tensor: &CubeTensor) -> Self {
        self.reads.push(tensor.handle.clone());
        self
    }

    /// A tensor's buffer that the work writes, or reads and writes.
    pub fn writes(mut self, tensor: &CubeTensor) -> Self {
        self.writes.push(tensor.handle.clone().binding());
        self
    }

    fn failed(&self, why: impl fmt::Display) -> ServerError {
        let reason = format!("{}: {why}", (self.describe)());
        ServerError::Generic {
            reason,
            backtrace: BackTrace::capture(),
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&(self.describe)())
    }
}

/// Buffers that work on another stream still uses: they stay where they are until this is dropped,
/// which must not be before CubeCL's stream waits for that work.
#[derive(Clone, Default)]
pub struct Retained(Arc<Mutex<Vec<Kept>>>);

/// The tensors that one operation reads, and what pins all of its buffers.
type Kept = (Vec<Handle>, Vec<Resource>);

impl Retained {
    fn keep(&self, handles: Vec<Handle>, resources: Vec<Resource>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((handles, resources));
    }
}

impl fmt::Debug for Retained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        write!(f, "Retained({kept} operations)")
    }
}

impl CudaQueue {
    /// The queue of the GPU that a tensor is on; `None` for one on no CUDA device.
    pub fn of(tensor: &CubeTensor) -> Option<Self> {
        let CubeDevice::Cuda(_) = tensor.device else {
            return None;
        };
        Some(Self::on(tensor.client.service_id().device))
    }

    /// The queue of a GPU; `None` for another device.
    pub fn for_device(device: &Device) -> Option<Self> {
        match device.clone().inner().as_dispatch() {
            DispatchDevice::Cube(CubeDevice::Cuda(gpu)) => Some(Self::on(gpu.to_id())),
            _ => None,
        }
    }

    /// The queue of a device.
    fn on(device: DeviceId) -> Self {
        // Making a handle takes a lock of the whole process; a clone of one does not.
        thread_local! {
            static HANDLES: RefCell<HashMap<DeviceId, DeviceHandle<Server>>> = RefCell::default();
        }
        let device = HANDLES.with_borrow_mut(|handles| {
            handles
                .entry(device)
                .or_insert_with(|| DeviceHandle::new(device))
                .clone()
        });
        Self {
            device,
            stream: StreamId::current(),
        }
    }

    /// Runs `work` on the device thread, in order with every launch submitted before it. It puts
    /// work on the stream that it is given and returns; it must not wait for the device, read a
    /// tensor or allocate one.
    ///
    /// If a buffer that it reads was never written because of an earlier failure, `work` does not run
    /// and its outputs carry that failure on; if it fails or panics, they carry its own.
    pub fn enqueue(
        &self,
        op: Op,
        work: impl FnOnce(Stream, &Buffers) -> Result<(), CudaError> + Send + 'static,
    ) {
        self.submit(op, None, work);
    }

    /// As [`enqueue`](Self::enqueue), for work on a stream of its own: the buffers stay where they
    /// are until `retained` is dropped.
    pub fn enqueue_retaining(
        &self,
        op: Op,
        retained: &Retained,
        work: impl FnOnce(Stream, &Buffers) -> Result<(), CudaError> + Send + 'static,
    ) {
        self.submit(op, Some(retained.clone()), work);
    }

    fn submit(
        &self,
        op: Op,
        retained: Option<Retained>,
        work: impl FnOnce(Stream, &Buffers) -> Result<(), CudaError> + Send + 'static,
    ) {
        let id = self.stream;
        let mut op = op;
        self.device.submit(move |server| {
            let hook = op.on_failure.take();
            let failed = |error: &ServerError| {
                if let Some(hook) = hook {
                    hook(&error.to_string());
                }
            };
            // Also makes the context current, orders this stream behind the one a buffer came from,
            // and pins the allocations.
            let read = op.reads.iter().map(|handle| handle.clone().binding());
            let bindings: Vec<_> = read.chain(op.writes.iter().cloned()).collect();
            let resources: Result<Vec<Resource>, ServerError> = bindings
                .iter()
                .map(|binding| server.get_resource(binding.clone(), id))
                .collect();
            let resources = match resources {
                Ok(resources) => resources,
                Err(error) => {
                    failed(&op.failed(&error));
                    return failed_writing(server, id, op.writes, error);
                }
            };
            let raw = |(resource, of): (&Resource, &BufferBinding)| RawBuffer {
                ptr: resource.resource().ptr,
                bytes: of.size - of.offset_start.unwrap_or(0) - of.offset_end.unwrap_or(0),
            };
            let mut reads: Vec<_> = resources.iter().zip(&bindings).map(raw).collect();
            let writes = reads.split_off(op.reads.len());
            let buffers = Buffers { reads, writes };
            let written = op.writes.clone();
            let outcome = ExecuteScope::over(server, id, written).execute(|server| {
                let stream = server
                    .write_streams()
                    .try_stream_mut(&id)
                    .map(|stream| stream.sys);
                let stream = stream.ok_or_else(|| op.failed("this rank has no stream yet"))?;
                match catch_unwind(AssertUnwindSafe(|| work(Stream(stream), &buffers))) {
                    Ok(done) => done.map_err(|error| op.failed(error)),
                    Err(panic) => Err(op.failed(panic_message(panic.as_ref()))),
                }
            });
            if let ScopedOutcome::Failed(error) = outcome {
                failed(&error);
            }
            if let Some(retained) = retained {
                retained.keep(op.reads, resources);
            }
        });
    }

    /// Runs `task` on the device thread with the CUDA context current, and waits for it. For set-up
    /// and teardown, not for steps.
    ///
    /// # Errors
    /// The task's own, or its panic.
    pub fn on_device_thread<T: Send>(
        &self,
        task: impl FnOnce() -> Result<T, CudaError> + Send,
    ) -> Result<T, CudaError> {
        let done = self.device.submit_blocking(move |_| {
            catch_unwind(AssertUnwindSafe(task))
                .unwrap_or_else(|panic| Err(CudaError::Refused(panic_message(panic.as_ref()))))
        });
        done.unwrap_or_else(|error| Err(CudaError::Refused(format!("{error:?}"))))
    }

    /// The GPU, as CubeCL knows it.
    pub(crate) fn device_id(&self) -> DeviceId {
        self.device.device_id()
    }

    /// Starts what was submitted so far. Submitted work waits until 32 pieces are together: call this
    /// after a collective, and before this host waits for another rank, whose GPU may wait for it.
    pub fn flush(&self) {
        self.device.flush_queue();
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "CudaQueue({:?}, {:?})",
            self.device.device_id(),
            self.stream
        )
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!(
        "panicked: {}",
        text.as_deref().unwrap_or("a value that is no text")
    )
}
