use std::ops::Range;

use burn::tensor::Tensor;

/// A slice of `buffer` into which a step may round a parameter (see [`AdamwState::rounded`] and its
/// counterparts); writes to the slice are visible in `buffer`.
///
/// Returns `None` on CPUs, and where the slice does not start at a multiple of 512 bytes. Use it
/// for no other purpose: operations that read a tensor's memory size may reach up to the next such
/// multiple.
///
/// # Shapes
/// `buffer: [n]`; the result: `[range]`
///
/// [`AdamwState::rounded`]: crate::AdamwState::rounded
pub fn bf16_out_slice(buffer: &Tensor<1>, range: Range<usize>) -> Option<Tensor<1>> {
    #[cfg(feature = "cuda")]
    {
        use burn::backend::Cube;
        use megaburn_cuda::tensor;

        let whole = tensor::from_backend(buffer.clone().try_into_primitive::<Cube>().ok()?);
        let part = tensor::uninitialized_slice(&whole, range.start, [range.len()])?;
        Some(Tensor::from_primitive::<Cube>(tensor::into_backend(part)))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (buffer, range);
        None
    }
}
