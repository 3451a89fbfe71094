use burn::tensor::{Device, Tensor};
use megaburn_kernels::RecomputeFn;

/// What a layer reads: a tensor and, where the layer shall not keep it until backward, how it is
/// computed once more (Megatron's output-discarding recompute, `CheckpointWithoutOutput` in
/// `megatron/core/tensor_parallel/random.py`).
///
/// Layers take `impl Into<Recomputable<D>>`: a plain tensor is one that they keep. A [`Norm`](crate::Norm) or
/// an [`Mlp`](crate::Mlp) that was told to recompute makes others.
#[derive(Clone, Debug)]
pub struct Recomputable<const D: usize> {
    tensor: Tensor<D>,
    again: Option<RecomputeFn>,
}

impl<const D: usize> Recomputable<D> {
    /// `tensor`, which `again` computes once more, to the bit.
    pub fn recomputed(tensor: Tensor<D>, again: RecomputeFn) -> Self {
        Self {
            tensor,
            again: Some(again),
        }
    }

    /// The tensor by itself.
    pub fn into_tensor(self) -> Tensor<D> {
        self.tensor
    }

    /// The size of each dimension.
    pub fn dims(&self) -> [usize; D] {
        self.tensor.dims()
    }

    pub(crate) fn device(&self) -> Device {
        self.tensor.device()
    }

    pub(crate) fn into_parts(self) -> (Tensor<D>, Option<RecomputeFn>) {
        (self.tensor, self.again)
    }

    /// What `f`, which changes no number, makes of the tensor.
    pub(crate) fn map(self, f: impl FnOnce(Tensor<D>) -> Tensor<D>) -> Self {
        Self {
            tensor: f(self.tensor),
            again: self.again,
        }
    }

    /// What `there` makes of the tensor. It is not kept, but what it was made of, of whose rows `again`
    /// makes it once more.
    pub(crate) fn moved(
        self,
        there: impl FnOnce(Tensor<D>) -> Tensor<D>,
        again: impl Fn(Tensor<2>) -> Tensor<2> + Send + Sync + 'static,
    ) -> Self {
        let source = self.again.unwrap_or_else(|| kept(&self.tensor));
        Self {
            tensor: there(self.tensor),
            again: Some(source.map(again)),
        }
    }
}

/// A tensor that is there again because it is kept.
pub(crate) fn kept<const D: usize>(tensor: &Tensor<D>) -> RecomputeFn {
    let tensor = tensor.clone().inner();
    RecomputeFn::new(move || tensor.clone())
}

impl<const D: usize> From<Tensor<D>> for Recomputable<D> {
    fn from(tensor: Tensor<D>) -> Self {
        Self {
            tensor,
            again: None,
        }
    }
}
