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

use crate::{error::CudaError, streams::Stream};

/// CubeCL's CUDA server, which lives on its device's thread.
pub type Server = <CudaRuntime as Runtime>::Server;

type Resource = ManagedResource<<<Server as ServerStorage>::Storage as ComputeStorage>::Resource>;

/// The device thread of one GPU and this rank's stream on it.
#[derive(Clone)]
pub struct CudaQueue {
    device: DeviceHandle<Server>,
    stream: StreamId,
}

/// Called with the reason when work fails.
type Hook = Box<dyn FnOnce(&str) + Send>;

/// A piece of work: its description and the buffers that it uses.
pub struct Op {
    describe: Box<dyn Fn() -> String + Send>,
    on_failure: Option<Hook>,
    /// The tensors that it reads. The handles keep their buffers from being reused in place before
    /// the work is done.
    reads: Vec<Handle>,
    /// The buffers that it writes. These are bindings and not handles, so that later work may reuse
    /// the buffers in place.
    writes: Vec<BufferBinding>,
}

/// The place of a buffer in device memory; valid while the work that gets it is being enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBuffer {
    /// The address of its first byte, including the offset of a slice.
    pub ptr: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The buffers of an [`Op`], in the order in which they were added.
#[derive(Debug)]
pub struct Buffers {
    /// The buffers that the work reads.
    pub reads: Vec<RawBuffer>,
    /// The buffers that the work writes, or reads and writes.
    pub writes: Vec<RawBuffer>,
}

impl Op {
    /// Creates work that `describe` names, including shapes. `describe` is called only if the work
    /// fails.
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

    /// Calls `hook` on the device thread with the reason if the work fails, or cannot run because
    /// one of its inputs was never written. Use it for work that other threads wait for.
    pub fn on_failure(mut self, hook: impl FnOnce(&str) + Send + 'static) -> Self {
        self.on_failure = Some(Box::new(hook));
        self
    }

    /// Adds a tensor whose buffer the work reads.
    pub fn reads(mut self, tensor: &CubeTensor) -> Self {
        self.reads.push(tensor.handle.clone());
        self
    }

    /// Adds a tensor whose buffer the work writes, or reads and writes.
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

/// The buffers of work on another stream, which are neither moved nor freed until this is dropped.
/// It must not be dropped before CubeCL's stream waits for that work.
#[derive(Clone, Default)]
pub struct Retained(Arc<Mutex<Vec<Kept>>>);

/// The tensors that one operation reads, and the resources that pin all of its buffers.
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
    /// The queue of the GPU that a tensor is on; `None` if it is not on a CUDA device.
    pub fn of(tensor: &CubeTensor) -> Option<Self> {
        let CubeDevice::Cuda(_) = tensor.device else {
            return None;
        };
        Some(Self::on(tensor.client.service_id().device))
    }

    /// The queue of a GPU; `None` for other devices.
    pub fn for_device(device: &Device) -> Option<Self> {
        gpu_id(device).map(Self::on)
    }

    /// The queue of a device, given its id.
    fn on(device: DeviceId) -> Self {
        // Creating a handle takes a process-wide lock; cloning one does not.
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

    /// Runs `work` on the device thread, in order with all launches submitted before it. `work`
    /// enqueues on the given stream and returns; it must not wait for the device, and must not read
    /// or allocate tensors.
    ///
    /// If one of its inputs was never written because of an earlier failure, `work` does not run
    /// and its outputs carry that failure. If it fails or panics itself, they carry its own
    /// failure.
    pub fn enqueue(
        &self,
        op: Op,
        work: impl FnOnce(Stream, &Buffers) -> Result<(), CudaError> + Send + 'static,
    ) {
        self.submit(op, None, work);
    }

    /// Like [`enqueue`](Self::enqueue), for work on another stream: the buffers are neither moved
    /// nor freed until `retained` is dropped.
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
            // This also makes the context current, makes this stream wait for the streams that
            // buffers came from, and pins the allocations.
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

    /// Runs `task` on the device thread with the CUDA context current, and waits for it. Use it for
    /// setup and teardown, not in steps.
    ///
    /// # Errors
    /// The task returns an error or panics.
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

    /// The id of the GPU in CubeCL.
    pub(crate) fn device_id(&self) -> DeviceId {
        self.device.device_id()
    }

    /// Starts all work submitted so far. Otherwise work is held back until 32 items are queued.
    /// Call this after a collective, and before the host waits for another rank, whose GPU may be
    /// waiting for this one.
    pub fn flush(&self) {
        self.device.flush_queue();
    }
}

/// The id of a GPU in CubeCL; `None` for other devices.
pub(crate) fn gpu_id(device: &Device) -> Option<DeviceId> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Cuda(gpu)) => Some(gpu.to_id()),
        _ => None,
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
        text.as_deref().unwrap_or("a value that is not a string")
    )
}
