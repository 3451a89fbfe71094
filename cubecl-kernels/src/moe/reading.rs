//! Numbers that the host waits for, while the device goes on.

use std::fmt;

use burn::tensor::{DType, Int, Tensor};

/// Numbers on their way to the host.
#[must_use = "they are had by waiting for them"]
pub struct Reading(State);

enum State {
    Here(Vec<i64>),
    #[cfg(feature = "cuda")]
    Coming(cube::Coming),
}

impl fmt::Debug for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reading")
    }
}

/// Sends numbers of i32 to the host. On a GPU they are on their way at once, before what is computed from now on,
/// which goes on while the host [waits](Reading::wait).
///
/// # Panics
/// If they are of another dtype.
pub fn start_reading(x: Tensor<1, Int>) -> Reading {
    assert_eq!(x.dtype(), DType::I32, "start_reading: numbers are not of i32");
    #[cfg(feature = "cuda")]
    if super::cube::ints_on_gpu(&x) {
        return Reading(State::Coming(cube::start(x)));
    }
    Reading(State::Here(x.into_data().iter().collect()))
}

impl Reading {
    /// The numbers.
    ///
    /// # Panics
    /// If the device failed before.
    pub fn wait(self) -> Vec<i64> {
        match self.0 {
            State::Here(numbers) => numbers,
            #[cfg(feature = "cuda")]
            State::Coming(coming) => cube::wait(coming),
        }
    }
}

#[cfg(feature = "cuda")]
mod cube {
    use std::pin::Pin;

    use burn::tensor::{Int, Tensor};
    use cubecl::bytes::Bytes;
    use cubecl::future::block_on;
    use cubecl::server::ServerError;

    pub(super) struct Coming {
        bytes: Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send>>,
        len: usize,
    }

    pub(super) fn start(x: Tensor<1, Int>) -> Coming {
        let ([len], x) = (x.dims(), crate::moe::cube::ints(x));
        Coming { bytes: Box::pin(x.client.read_async(vec![x.handle])), len }
    }

    pub(super) fn wait(Coming { bytes, len }: Coming) -> Vec<i64> {
        let bytes = block_on(bytes).unwrap_or_else(|error| panic!("start_reading: {error}"));
        let (numbers, _) = bytes[0].as_chunks();
        numbers[..len].iter().map(|&number| i64::from(i32::from_ne_bytes(number))).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::testing::{assert_refused, device};

    #[test]
    fn numbers_are_read_and_others_refused() {
        let numbers = || TensorData::from([3i32, -1, i32::MAX]);
        let on = |dtype| Tensor::<1, Int>::from_data(numbers(), (&device().inner(), dtype));
        assert_eq!(start_reading(on(DType::I32)).wait(), [3, -1, i64::from(i32::MAX)]);
        assert_refused(|| start_reading(on(DType::I64)).wait(), "not of i32");
    }
}
