use burn::tensor::Tensor;
#[cfg(feature = "cuda")]
pub(super) use megaburn_cuda::nccl::Lane;

use super::Moved;

/// Where a collective runs; without GPUs there is nothing to run beside.
#[cfg(not(feature = "cuda"))]
#[derive(Clone, Copy)]
pub(super) enum Lane {
    InOrder,
    Overlapped,
}

/// A collective that was started: its result, once waited for. Dropping it waits too.
#[derive(Debug)]
#[must_use = "what a collective gives is had by waiting for it"]
pub struct Pending<const D: usize, K: Moved>(State<D, K>);

#[derive(Debug)]
enum State<const D: usize, K: Moved> {
    Done(Tensor<D, K>),
    #[cfg(feature = "cuda")]
    Started(megaburn_cuda::Started),
}

impl<const D: usize, K: Moved> Pending<D, K> {
    pub(super) fn done(x: Tensor<D, K>) -> Self {
        Self(State::Done(x))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn started(x: megaburn_cuda::Started) -> Self {
        Self(State::Started(x))
    }

    /// The result before it is there: for what is computed behind [`wait`](Self::wait), and for nothing
    /// else.
    pub fn peek(&self) -> Tensor<D, K> {
        match &self.0 {
            State::Done(x) => x.clone(),
            #[cfg(feature = "cuda")]
            State::Started(x) => K::from_gpu(x.peek()),
        }
    }

    /// The result. On a GPU, what is computed from now on waits for it; the host does not.
    pub fn wait(self) -> Tensor<D, K> {
        match self.0 {
            State::Done(x) => x,
            #[cfg(feature = "cuda")]
            State::Started(x) => K::from_gpu(x.wait()),
        }
    }
}
