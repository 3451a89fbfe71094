use std::ops::Range;

use burn::tensor::Tensor;

/// Memory of `buffer` that a step may round a parameter into ([`AdamwState::rounded`] and others'): what
/// is written there is seen in `buffer`. None where there is no such memory: on CPUs, and where it does
/// not start at a multiple of 512 bytes. For nothing else: operations that go by how much memory a tensor
/// has may reach up to the next such multiple.
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
