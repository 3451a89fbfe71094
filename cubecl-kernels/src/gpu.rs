//! Questions and requests to the GPU that a tensor is on.

use burn::tensor::Tensor;

/// Submits all work queued so far to the GPU that `x` is on; a no-op on other devices. Work is
/// otherwise submitted in batches of 32 tasks, which would leave a GPU idle that has just waited
/// for the host, e.g. after [`read_overlapped`](crate::read_overlapped).
pub fn flush<const D: usize>(x: &Tensor<D>) {
    #[cfg(feature = "cuda")]
    {
        use crate::kernel_parts::on_gpu;

        let x = x.clone();
        let x = if x.device().is_autodiff() {
            x.inner()
        } else {
            x
        };
        if let Some(queue) = on_gpu(&x).as_ref().and_then(megaburn_cuda::CudaQueue::of) {
            queue.flush();
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = x;
}

/// Whether a tensor is on a GPU, where reading it blocks until all earlier work is done.
pub fn is_on_gpu<const D: usize>(x: &Tensor<D>) -> bool {
    #[cfg(feature = "cuda")]
    return x
        .clone()
        .inner()
        .try_into_primitive::<burn::backend::Cube>()
        .is_ok();
    #[cfg(not(feature = "cuda"))]
    {
        let _ = x;
        false
    }
}
