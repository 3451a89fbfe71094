//! Main gradients in slices of a larger buffer.

use burn::tensor::Tensor;

/// A slice of `buffer` as a matrix that shares its memory, so that a sum is written into the buffer
/// directly ([`MainGrad::with_out_buffer`](crate::MainGrad::with_out_buffer)). `None` where that is
/// impossible: on CPUs, and where `start` is not aligned as GPUs need it (512 bytes).
///
/// # Shapes
/// `buffer: [n]`; the matrix: `shape`, from element `start` on
pub fn bucket_slice(buffer: &Tensor<1>, start: usize, shape: [usize; 2]) -> Option<Tensor<2>> {
    #[cfg(feature = "cuda")]
    {
        use burn::backend::Cube;
        use megaburn_cuda::tensor;

        let whole = tensor::from_backend(buffer.clone().try_into_primitive::<Cube>().ok()?);
        let part = tensor::slice_of(&whole, start, shape)?;
        Some(Tensor::from_primitive::<Cube>(tensor::into_backend(part)))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (buffer, start, shape);
        None
    }
}

/// Whether `sum` is in the memory that [`bucket_slice`] would give it.
pub fn is_view_of(sum: &Tensor<2>, buffer: &Tensor<1>, start: usize) -> bool {
    #[cfg(feature = "cuda")]
    {
        use burn::backend::Cube;
        use megaburn_cuda::tensor;

        let on_gpu = |x: Tensor<2>| {
            x.try_into_primitive::<Cube>()
                .ok()
                .map(tensor::from_backend)
        };
        let room = bucket_slice(buffer, start, sum.dims()).and_then(on_gpu);
        room.zip(on_gpu(sum.clone()))
            .is_some_and(|(room, sum)| tensor::is_same(&room, &sum))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (sum, buffer, start);
        false
    }
}
