#[cfg(feature = "cuda")]
use {burn_cubecl::tensor::CubeTensor, megaburn_cuda::AsyncOp};

/// A started collective; [`wait`](Self::wait) returns its result. Dropping it waits too.
#[derive(Debug)]
#[must_use = "call `wait` to get the result"]
pub struct Work<T>(WorkState<T>);

#[derive(Debug)]
#[cfg_attr(
    feature = "cuda",
    expect(
        clippy::large_enum_variant,
        reason = "few collectives are in flight at a time"
    )
)]
enum WorkState<T> {
    Done(T),
    /// The result's memory on the GPU, and what makes the result of it.
    #[cfg(feature = "cuda")]
    Started(AsyncOp, fn(CubeTensor) -> T),
}

impl<T> Work<T> {
    pub(super) fn done(result: T) -> Self {
        Self(WorkState::Done(result))
    }

    #[cfg(feature = "cuda")]
    pub(super) fn started(op: AsyncOp, result: fn(CubeTensor) -> T) -> Self {
        Self(WorkState::Started(op, result))
    }

    /// Returns the result tensor before it is complete. Use it only in computation that is enqueued
    /// after [`wait`](Self::wait).
    pub fn peek(&self) -> T
    where
        T: Clone,
    {
        match &self.0 {
            WorkState::Done(result) => result.clone(),
            #[cfg(feature = "cuda")]
            WorkState::Started(op, result) => result(op.peek()),
        }
    }

    /// Returns the result. On a GPU, kernels enqueued from now on wait for it; the host does not.
    pub fn wait(self) -> T {
        match self.0 {
            WorkState::Done(result) => result,
            #[cfg(feature = "cuda")]
            WorkState::Started(op, result) => result(op.wait()),
        }
    }
}
