use burn::tensor::Tensor;
#[cfg(feature = "cuda")]
pub(super) use megaburn_cuda::nccl::Lane;

use super::CollectiveElement;

/// The stream that a collective runs on; without GPUs there is nothing to overlap with.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy)]
pub(super) enum Lane {
    InOrder,
    Overlapped,
}

/// A started collective; [`wait`](Self::wait) returns its result. Dropping it waits too.
#[derive(Debug)]
#[must_use = "call `wait` to get the result"]
pub struct AsyncCollective<const D: usize, K: CollectiveElement>(CollectiveState<D, K>);

#[derive(Debug)]
enum CollectiveState<const D: usize, K: CollectiveElement> {
    Done(Tensor<D, K>),
    #[cfg(feature = "cuda")]
    Started(megaburn_cuda::AsyncOp),
}

impl<const D: usize, K: CollectiveElement> AsyncCollective<D, K> {
    pub(super) fn done(x: Tensor<D, K>) -> Self {
        Self(CollectiveState::Done(x))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn started(x: megaburn_cuda::AsyncOp) -> Self {
        Self(CollectiveState::Started(x))
    }

    /// Returns the result tensor before it is complete. Use it only in computation that is enqueued
    /// after [`wait`](Self::wait).
    pub fn peek(&self) -> Tensor<D, K> {
        match &self.0 {
            CollectiveState::Done(x) => x.clone(),
            #[cfg(feature = "cuda")]
            CollectiveState::Started(x) => K::from_gpu(x.peek()),
        }
    }

    /// Returns the result. On a GPU, kernels enqueued from now on wait for it; the host does not.
    pub fn wait(self) -> Tensor<D, K> {
        match self.0 {
            CollectiveState::Done(x) => x,
            #[cfg(feature = "cuda")]
            CollectiveState::Started(x) => K::from_gpu(x.wait()),
        }
    }
}
