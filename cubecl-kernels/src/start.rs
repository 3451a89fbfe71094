use burn::tensor::Tensor;

/// Starts what was asked for up to now on the GPU that `x` is on: work is submitted 32 pieces at once, and a GPU that
/// waits for the host, as behind [`read_meanwhile`](crate::read_meanwhile), shall not wait for so many. Nothing
/// elsewhere.
pub fn start<const D: usize>(x: &Tensor<D>) {
    #[cfg(feature = "cuda")]
    if let Some(queue) = megaburn_cuda::CudaQueue::for_device(&x.device()) {
        queue.flush();
    }
    #[cfg(not(feature = "cuda"))]
    let _ = x;
}
