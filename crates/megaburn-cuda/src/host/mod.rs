//! Tensors in host memory, which come to the GPU and go from it beside its kernels.
//!
//! The memory is pinned, so that the GPU copies by itself, over a stream of its own for each direction.
//! The host waits for nothing: a copy waits on the GPU for what its tensor is computed from, or for the
//! memory that it goes to; what reads a tensor waits for its copy.

mod copy_streams;
mod pinned;
pub(crate) mod staged;

use std::{fmt, sync::Arc};

use burn::tensor::{DType, TensorData};
use burn_cubecl::{CubeDevice, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::client::Client;

use crate::{
    AsyncOp, CudaError, CudaQueue, Op, Retained,
    async_op::{Done, Join},
    tensor::contiguous,
};
use copy_streams::CopyStreams;
use pinned::Pinned;

/// The values of a tensor, in host memory. A clone is the same memory, which is not written while there
/// are several.
#[derive(Clone)]
pub struct HostTensor(Arc<HostTensorParts>);

struct HostTensorParts {
    /// The device thread has it too, until it has started a copy.
    pinned: Arc<Pinned>,
    client: Client,
    device: CubeDevice,
    queue: CudaQueue,
    len: usize,
    dtype: DType,
    /// For messages.
    name: Arc<str>,
}

/// A tensor on its way to host memory. CubeCL's stream waits for it when this is dropped, and then its
/// memory on the GPU is let go; the host does not wait.
#[derive(Debug)]
#[must_use = "what leaves takes memory on the GPU until this is dropped"]
pub struct D2hCopy {
    /// Waits when it is dropped.
    _join: Join,
}

impl HostTensor {
    /// Memory for a tensor like `x`; nothing is in it yet.
    ///
    /// # Errors
    /// `x` is on no GPU, or the host has no such memory.
    ///
    /// # Panics
    /// If `x` has no elements.
    pub fn like(x: &CubeTensor) -> Result<Self, CudaError> {
        let on_no_gpu = || CudaError::Refused(format!("a tensor on {:?} is on no GPU", x.device));
        let queue = CudaQueue::of(x).ok_or_else(on_no_gpu)?;
        let len = x.meta.num_elements();
        let dtype = x.dtype;
        assert!(len > 0, "a tensor with elements");
        let pinned = Arc::new(Pinned::new(CopyStreams::of(&queue)?, len * dtype.size())?);
        let name = format!("host copy of [{len}] {dtype:?}").into();
        let client = x.client.clone();
        let device = x.device.clone();
        Ok(Self(Arc::new(HostTensorParts {
            pinned,
            client,
            device,
            queue,
            len,
            dtype,
            name,
        })))
    }

    /// Whether it takes `x`: nobody else has this memory, and `x` is as long, of the same type and on
    /// the same GPU.
    pub fn takes(&self, x: &CubeTensor) -> bool {
        let HostTensorParts {
            device, len, dtype, ..
        } = &*self.0;
        let is_like = (*len, *dtype, device) == (x.meta.num_elements(), x.dtype, &x.device);
        Arc::strong_count(&self.0) == 1 && is_like
    }

    /// Takes the values of `x`, in row-major order, beside what is computed next; in place of what was
    /// here. What is fetched or read from now on is these values, or the reason why there are none.
    ///
    /// # Panics
    /// Unless it [takes](Self::takes) `x`.
    pub fn store(&mut self, x: CubeTensor) -> D2hCopy {
        assert!(self.takes(&x), "{:?} was not made for {x:?}", self.0.name);
        let HostTensorParts { pinned, queue, .. } = &*self.0;
        let x = contiguous(x);
        let failed = pinned.clone();
        let op = self.op().reads(&x).on_failure(move |why| failed.fail(why));
        let pinned = pinned.clone();
        let retained = Retained::default();
        let done = Done::default();
        let point = done.clone();
        queue.enqueue_retaining(op, &retained, move |stream, buffers| {
            let stored = pinned.store(buffers.reads[0], stream)?;
            *point.lock().expect("nobody panics with it") = Some(stored);
            Ok(())
        });
        queue.flush();
        D2hCopy {
            _join: self.join(done, retained),
        }
    }

    /// A copy on the GPU, `[elements]`, which comes beside what is computed next.
    pub fn fetch(&self) -> AsyncOp {
        let HostTensorParts {
            pinned,
            client,
            device,
            queue,
            len,
            dtype,
            ..
        } = &*self.0;
        let shape = [*len].into();
        let out = empty_device_contiguous_dtype(client.clone(), device.clone(), shape, *dtype);
        let op = self.op().writes(&out);
        let pinned = pinned.clone();
        let retained = Retained::default();
        let done = Done::default();
        let point = done.clone();
        queue.enqueue_retaining(op, &retained, move |stream, buffers| {
            let fetched = pinned.fetch(buffers.writes[0], stream)?;
            *point.lock().expect("nobody panics with it") = Some(fetched);
            Ok(())
        });
        queue.flush();
        AsyncOp::overlapped(out, self.join(done, retained))
    }

    /// The values, `[elements]`. This thread waits until they are here.
    ///
    /// # Errors
    /// Why there are none, or the GPU's.
    pub fn read(&self) -> Result<TensorData, CudaError> {
        let HostTensorParts {
            pinned,
            queue,
            len,
            dtype,
            ..
        } = &*self.0;
        // What was stored before is on its way then.
        queue.on_device_thread(|| Ok(()))?;
        Ok(TensorData::from_bytes_vec(pinned.read()?, [*len], *dtype))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Bytes of host memory.
    pub fn bytes(&self) -> usize {
        self.0.pinned.bytes()
    }

    fn op(&self) -> Op {
        let name = self.0.name.clone();
        Op::new(move || name.to_string())
    }

    fn join(&self, done: Done, retained: Retained) -> Join {
        Join::new(self.0.queue.clone(), self.0.name.clone(), done, retained)
    }
}

impl fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostTensor({})", self.0.name)
    }
}
