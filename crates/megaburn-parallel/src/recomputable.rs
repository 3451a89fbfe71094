use burn::tensor::{Device, Tensor};
use megaburn_autograd::RecomputeFn;
use megaburn_kernels::{FoundAmax, FoundAmaxes};

/// The input of a layer: a tensor and, if the layer should not save it for backward, a function
/// that recomputes it (Megatron's output-discarding recompute, `CheckpointWithoutOutput` in
/// `megatron/core/tensor_parallel/random.py`).
///
/// Layers take `impl Into<Recomputable<D>>`. A plain tensor is saved. A [`Norm`](crate::Norm) or an
/// [`Mlp`](crate::Mlp) that is configured to recompute makes recomputable ones.
#[derive(Clone, Debug)]
pub struct Recomputable<const D: usize> {
    tensor: Tensor<D>,
    again: Option<RecomputeFn>,
    found: FoundAmaxes,
}

impl<const D: usize> Recomputable<D> {
    /// Wraps `tensor`, which `again` recomputes bit for bit.
    pub fn recomputed(tensor: Tensor<D>, again: RecomputeFn) -> Self {
        Self {
            tensor,
            again: Some(again),
            found: FoundAmaxes::default(),
        }
    }

    /// The same input with its largest magnitude, which another operation finds.
    pub(crate) fn with_amax(mut self, found: Option<FoundAmax>) -> Self {
        self.found.input = found;
        self
    }

    /// The same input with the largest magnitude of the gradient of the result that the layer computes
    /// from it. Another operation finds it in the backward pass: that which writes the gradient.
    pub fn with_gradient_amax(mut self, found: Option<FoundAmax>) -> Self {
        self.found.gradient = found;
        self
    }

    /// Takes the largest magnitude of the result's gradient. A layer that consists of several ones
    /// takes it for the last of them.
    pub(crate) fn take_gradient_amax(&mut self) -> Option<FoundAmax> {
        self.found.gradient.take()
    }

    /// The largest magnitudes that other operations find.
    pub(crate) fn found(&self) -> FoundAmaxes {
        self.found.clone()
    }

    /// Returns the tensor alone.
    pub fn into_tensor(self) -> Tensor<D> {
        self.tensor
    }

    /// The size of each dimension.
    pub fn dims(&self) -> [usize; D] {
        self.tensor.dims()
    }

    /// The device of the value.
    pub fn device(&self) -> Device {
        self.tensor.device()
    }

    pub(crate) fn into_parts(self) -> (Tensor<D>, Option<RecomputeFn>) {
        (self.tensor, self.again)
    }

    /// Applies `f`, which must not change the values, to the tensor.
    pub(crate) fn map(self, f: impl FnOnce(Tensor<D>) -> Tensor<D>) -> Self {
        Self {
            tensor: f(self.tensor),
            ..self
        }
    }

    /// Applies `there`, e.g. a collective, to the tensor. The result is not saved. Backward
    /// recomputes it by `again` from the rows of the input, which is saved or itself recomputed.
    pub(crate) fn map_recomputed(
        self,
        there: impl FnOnce(Tensor<D>) -> Tensor<D>,
        again: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static,
    ) -> Self {
        let source = self.again.unwrap_or_else(|| kept(&self.tensor));
        Self {
            tensor: there(self.tensor),
            again: Some(source.map(again)),
            // The result has other rows too.
            found: FoundAmaxes {
                input: None,
                ..self.found
            },
        }
    }
}

/// A recompute function that returns a saved tensor.
pub(crate) fn kept<const D: usize>(tensor: &Tensor<D>) -> RecomputeFn {
    let tensor = tensor.clone().inner();
    RecomputeFn::new(move || tensor.clone())
}

impl<const D: usize> From<Tensor<D>> for Recomputable<D> {
    fn from(tensor: Tensor<D>) -> Self {
        Self {
            tensor,
            again: None,
            found: FoundAmaxes::default(),
        }
    }
}
