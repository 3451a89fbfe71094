//! Largest magnitudes that were found by the operation which made the matrix.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use megaburn_autograd::IntoPrimitive;

/// The largest magnitude of a matrix from the kernel that writes the matrix, so that the layer
/// which quantises it does not read it a second time. Made for one pass: the operation that makes
/// the matrix and the layer that takes it get clones. If nothing was found, the layer finds it by
/// itself.
#[derive(Clone, Debug, Default)]
pub struct FoundAmax(Arc<Mutex<Option<Tensor<1>>>>);

/// The largest magnitudes of a layer's matrices that other operations find.
#[derive(Clone, Debug, Default)]
pub struct FoundAmaxes {
    /// That of the input.
    pub input: Option<FoundAmax>,
    /// That of the result's gradient.
    pub gradient: Option<FoundAmax>,
}

impl FoundAmax {
    /// Sets the magnitude, `[1]` in f32 without autodiff, or that there is none.
    pub fn set(&self, amax: Option<Tensor<1>>) {
        *self.lock() = amax;
    }

    /// A magnitude that is known, `[1]` in f32.
    pub(super) fn new(amax: Tensor<1>) -> Self {
        Self(Arc::new(Mutex::new(Some(amax))))
    }

    /// Sets the magnitude, `[1]` in f32.
    pub(crate) fn put<B: IntoPrimitive>(&self, amax: FloatTensor<B>) {
        *self.lock() = Some(B::wrap(amax));
    }

    /// The magnitude, `[1]` in f32 without autodiff, if it was found and no layer has taken it yet.
    pub fn value(&self) -> Option<Tensor<1>> {
        self.lock().clone()
    }

    /// The magnitude, once.
    pub(crate) fn take<B: IntoPrimitive>(&self) -> Option<FloatTensor<B>> {
        let found = self.lock().take();
        found.map(B::unwrap)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Tensor<1>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
