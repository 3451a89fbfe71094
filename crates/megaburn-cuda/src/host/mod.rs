//! Tensors in host memory that are copied to and from the GPU while kernels run.
//!
//! The memory is pinned, so that the GPU copies by itself, on a separate stream for each direction.
//! The host does not wait: on the GPU, a copy waits until its source is computed or its destination
//! is free, and readers of a tensor wait for its copy.

mod copy_streams;
mod pinned;
pub(crate) mod staged;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use burn::tensor::{AllocationProperty, Bytes, DType, TensorData};
use burn_cubecl::{CubeDevice, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::client::Client;

use crate::{
    async_op::{AsyncOp, Done, Join},
    error::CudaError,
    queue::{CudaQueue, Op, Retained},
    tensor::contiguous,
};
use copy_streams::CopyStreams;
use pinned::Pinned;

/// The values of a tensor, in pinned host memory. Clones share the memory, which is not written
/// while there are several.
#[derive(Clone)]
pub struct HostTensor(Arc<HostTensorParts>);

struct HostTensorParts {
    /// Shared with the device thread until it has started a copy.
    pinned: Arc<Pinned>,
    client: Client,
    device: CubeDevice,
    queue: CudaQueue,
    len: usize,
    dtype: DType,
    /// A description for messages.
    name: Arc<str>,
}

/// A device-to-host copy in flight. Dropping it makes CubeCL's stream wait for the copy and then
/// releases the memory on the GPU; the host does not wait.
#[derive(Debug)]
#[must_use = "the source stays allocated on the GPU until this is dropped"]
pub struct D2hCopy {
    /// Waits when it is dropped.
    _join: Join,
}

/// A tensor whose last store was waited for.
struct StoredValues(HostTensor);

impl AsRef<[u8]> for StoredValues {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `HostTensor::read` has waited for the last store. The next one needs a tensor
        // without clones (`HostTensor::store`), and this holds one.
        unsafe { self.0.0.pinned.values() }
    }
}

impl HostTensor {
    /// Allocates memory for a tensor like `x`; it is not initialized.
    ///
    /// # Errors
    /// `x` is not on a GPU, or the host has not enough memory that can be pinned.
    ///
    /// # Panics
    /// If `x` has no elements.
    pub fn like(x: &CubeTensor) -> Result<Self, CudaError> {
        let on_no_gpu = || {
            CudaError::Refused(format!(
                "the tensor is on {:?}, not on a CUDA \
            device",
                x.device
            ))
        };
        let queue = CudaQueue::of(x).ok_or_else(on_no_gpu)?;
        let len = x.meta.num_elements();
        let dtype = x.dtype;
        assert!(len > 0, "the tensor must not be empty");
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

    /// Whether `x` can be stored here: this memory is not shared, and `x` has the same length and
    /// type and is on the same GPU.
    pub fn takes(&self, x: &CubeTensor) -> bool {
        let HostTensorParts {
            device, len, dtype, ..
        } = &*self.0;
        let is_like = (*len, *dtype, device) == (x.meta.num_elements(), x.dtype, &x.device);
        let is_alone = Arc::strong_count(&self.0) == 1;
        // Another thread may have read the memory before it dropped its clone.
        fence(Ordering::Acquire);
        is_alone && is_like
    }

    /// Starts copying the values of `x`, in row-major order, replacing the previous values. The
    /// copy overlaps subsequent computation. Later fetches and reads get these values, or the
    /// reason why the copy failed.
    ///
    /// # Panics
    /// Unless it [takes](Self::takes) `x`.
    pub fn store(&mut self, x: CubeTensor) -> D2hCopy {
        assert!(self.takes(&x), "{:?} does not match {x:?}", self.0.name);
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
            *point
                .lock()
                .expect("no thread panics while holding the lock") = Some(stored);
            Ok(())
        });
        queue.flush();
        D2hCopy {
            _join: self.join(done, retained),
        }
    }

    /// Starts copying the values to the GPU, as `[elements]`; the copy overlaps subsequent
    /// computation.
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
            *point
                .lock()
                .expect("no thread panics while holding the lock") = Some(fetched);
            Ok(())
        });
        queue.flush();
        AsyncOp::overlapped(out, self.join(done, retained))
    }

    /// Returns the values, `[elements]`; the calling thread waits for them. They are not copied: the
    /// result is the pinned memory itself, which counts as a clone of this tensor. A change of the
    /// result copies it first.
    ///
    /// # Errors
    /// The last store failed, or the GPU reports an error.
    pub fn read(&self) -> Result<TensorData, CudaError> {
        let HostTensorParts {
            pinned,
            queue,
            len,
            dtype,
            ..
        } = &*self.0;
        // Afterwards, all stores that were enqueued before have been started.
        queue.on_device_thread(|| Ok(()))?;
        pinned.wait()?;
        let values = bytes::Bytes::from_owner(StoredValues(self.clone()));
        let values = Bytes::from_shared(values, AllocationProperty::Pinned);
        Ok(TensorData::from_bytes(values, [*len], *dtype))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Size of the host memory in bytes.
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
