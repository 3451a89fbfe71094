use burn::tensor::Tensor;

/// Starts what was asked for up to now on the GPU that `x` is on: work is submitted 32 pieces at once, and a GPU that
/// waits for the host, as behind [`read_overlapped`](crate::read_meanwhile), shall not wait for so many. Nothing
/// elsewhere.
pub fn flush<const D: usize>(x: &Tensor<D>) {
    #[cfg(feature = "cuda")]
    {
        use crate::cube::on_gpu;

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
