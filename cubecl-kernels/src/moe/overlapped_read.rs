use burn::tensor::{DType, Int, Tensor};

/// Reads i32 numbers to the host while `meanwhile` runs, and returns both results. On a GPU the
/// copy is enqueued first, then `meanwhile` enqueues its work, and only then the host waits for the
/// numbers.
///
/// # Panics
/// If `x` has another dtype, or the device failed before.
pub fn read_overlapped<T>(x: Tensor<1, Int>, meanwhile: impl FnOnce() -> T) -> (Vec<i64>, T) {
    assert_eq!(x.dtype(), DType::I32, "read_overlapped: x must be i32");
    #[cfg(feature = "cuda")]
    if super::launch::ints_on_gpu(&x) {
        return cube::read_overlapped(x, meanwhile);
    }
    let done = meanwhile();
    (x.into_data().iter().collect(), done)
}

#[cfg(feature = "cuda")]
mod cube {
    use burn::tensor::{Int, Tensor};
    use cubecl::future::block_on;
    use megaburn_cuda::CudaQueue;

    use crate::moe::launch::ints;

    pub(super) fn read_overlapped<T>(
        x: Tensor<1, Int>,
        meanwhile: impl FnOnce() -> T,
    ) -> (Vec<i64>, T) {
        let [len] = x.dims();
        let x = ints(x);
        let queue = CudaQueue::of(&x);
        let coming = x.client.read_async(vec![x.handle]);
        let done = meanwhile();
        if let Some(queue) = queue {
            // CubeCL batches launches: without a flush, a few of them would wait for more to come.
            queue.flush();
        }
        let bytes = block_on(coming).expect("read_overlapped: the device cannot be read");
        let (numbers, _) = bytes[0].as_chunks();
        let numbers = numbers[..len]
            .iter()
            .map(|&number| i32::from_ne_bytes(number));
        (numbers.map(i64::from).collect(), done)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;
    use megaburn_autograd::testing::{assert_refused, device};

    use super::*;

    #[test]
    fn numbers_are_read_and_others_refused() {
        let numbers = || TensorData::from([3i32, -1, i32::MAX]);
        let on = |dtype| Tensor::<1, Int>::from_data(numbers(), (&device().inner(), dtype));
        let found = read_overlapped(on(DType::I32), || "done");
        assert_eq!(found, (vec![3, -1, i64::from(i32::MAX)], "done"));
        assert_refused(|| read_overlapped(on(DType::I64), || ()), "x must be i32");
    }
}
