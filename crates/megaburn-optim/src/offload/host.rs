use burn::{
    Tensor,
    tensor::{DType, TensorData},
};
#[cfg(feature = "cuda")]
use {
    burn::backend::Cube,
    megaburn_cuda::{
        AsyncOp, CudaQueue,
        host::{self, HostTensor},
        tensor::{from_backend, into_backend},
    },
};

use super::in_place::values_in_place;
use crate::error::OptimError;

/// A tensor in host memory. A clone shares the values.
#[derive(Clone, Debug)]
pub(crate) struct OffloadedTensor(Memory);

#[cfg_attr(
    feature = "cuda",
    allow(
        clippy::large_enum_variant,
        reason = "there is one per state tensor of a parameter"
    )
)]
#[derive(Clone, Debug)]
enum Memory {
    /// A tensor of a device whose memory is host memory already.
    Own(Tensor<1>),
    /// Pinned host memory that holds a GPU's tensor.
    #[cfg(feature = "cuda")]
    Pinned(HostTensor),
}

/// A copy from host memory to the device, in flight.
#[derive(Debug)]
pub(super) enum H2dCopy {
    Here(Tensor<1>),
    #[cfg(feature = "cuda")]
    Started(AsyncOp),
}

/// A copy to host memory, in flight. It keeps device memory allocated until it is dropped; work
/// enqueued after that waits for the copy on the device.
#[derive(Debug)]
#[must_use = "the source stays allocated on the GPU until this is dropped"]
pub struct D2hCopy {
    #[cfg(feature = "cuda")]
    _way: Option<host::D2hCopy>,
}

impl OffloadedTensor {
    /// Copies the tensor to host memory, into the memory of `old` if that has no other user.
    ///
    /// # Errors
    /// The host memory cannot be allocated.
    pub(crate) fn store(
        tensor: Tensor<1>,
        old: Option<Self>,
    ) -> Result<(Self, D2hCopy), OptimError> {
        #[cfg(feature = "cuda")]
        if let Some(x) = on_gpu(&tensor) {
            let old = match old {
                Some(Self(Memory::Pinned(old))) => Some(old).filter(|old| old.takes(&x)),
                _ => None,
            };
            let host = old.map_or_else(|| HostTensor::like(&x), Ok);
            let mut host = host.map_err(|error| OptimError::HostMemory {
                why: error.to_string(),
            })?;
            let way = host.store(x);
            return Ok((Self(Memory::Pinned(host)), D2hCopy { _way: Some(way) }));
        }
        drop(old);
        let d2h = D2hCopy {
            #[cfg(feature = "cuda")]
            _way: None,
        };
        Ok((Self(Memory::Own(tensor)), d2h))
    }

    /// Starts a copy to the device that overlaps whatever is computed next.
    pub(super) fn fetch(&self) -> H2dCopy {
        match &self.0 {
            Memory::Own(tensor) => H2dCopy::Here(tensor.clone()),
            #[cfg(feature = "cuda")]
            Memory::Pinned(host) => H2dCopy::Started(host.fetch()),
        }
    }

    /// The values; this thread waits for them. They share this tensor's memory and are not copied,
    /// unless the tensor is on a device without host memory.
    ///
    /// # Errors
    /// The device cannot be read, or computing the values failed.
    pub(crate) fn read(&self) -> Result<TensorData, OptimError> {
        let read = match &self.0 {
            Memory::Own(tensor) => match values_in_place(tensor.clone()) {
                Some(values) => Ok(values),
                None => tensor.clone().try_into_data().map_err(|e| e.to_string()),
            },
            #[cfg(feature = "cuda")]
            Memory::Pinned(host) => host.read().map_err(|e| e.to_string()),
        };
        read.map_err(|why| OptimError::Device { why })
    }

    pub(crate) fn dtype(&self) -> DType {
        match &self.0 {
            Memory::Own(tensor) => tensor.dtype(),
            #[cfg(feature = "cuda")]
            Memory::Pinned(host) => host.dtype(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match &self.0 {
            Memory::Own(tensor) => tensor.shape().num_elements() * tensor.dtype().size(),
            #[cfg(feature = "cuda")]
            Memory::Pinned(host) => host.bytes(),
        }
    }
}

impl H2dCopy {
    /// The tensor. Work enqueued from now on waits for the copy on the device; the host does not
    /// wait.
    pub(super) fn wait(self) -> Tensor<1> {
        match self {
            Self::Here(tensor) => tensor,
            #[cfg(feature = "cuda")]
            Self::Started(started) => Tensor::from_primitive::<Cube>(into_backend(started.wait())),
        }
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(tensor: &Tensor<1>) -> Option<burn_cubecl::tensor::CubeTensor> {
    let x = from_backend(tensor.clone().try_into_primitive::<Cube>().ok()?);
    CudaQueue::of(&x).is_some().then_some(x)
}
