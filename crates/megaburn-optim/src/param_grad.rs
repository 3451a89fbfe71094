use std::ops::Range;

use burn::{
    Tensor,
    tensor::{DType, Device},
};
use megaburn_autograd::{MainGrad, is_view_of};
use megaburn_mesh::ParamSpec;

/// The flat gradient sums of one parameter; `None` counts as zero.
#[derive(Debug)]
pub(crate) struct ParamGrad {
    pub(crate) spec: ParamSpec,
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    /// The range of the local parameter of which this rank keeps the sum over ranks.
    pub(crate) kept: Range<usize>,
    /// This rank's own sum, not yet summed over ranks: `[local elements]`.
    pub(crate) own: Option<Tensor<1>>,
    /// The sum over ranks: `[kept]`.
    pub(crate) sum: Option<Tensor<1>>,
    /// Where the layer that uses the parameter accumulates its gradient, or a part of it.
    pub(crate) main_grad: Option<MainGrad>,
}

impl ParamGrad {
    pub(crate) fn num_elements(&self) -> usize {
        self.spec.shard.local_shape().iter().product()
    }

    /// Adds the layer's accumulated sum to `own`.
    pub(crate) fn gather(&mut self) {
        let Some(sum) = self.main_grad.as_ref().and_then(MainGrad::take) else {
            return;
        };
        let sum = sum.flatten(0, 1);
        self.own = Some(match self.own.take() {
            Some(own) => own + sum,
            None => sum,
        });
    }

    /// Takes this rank's own gradient; zeros if there is none.
    pub(crate) fn take_own(&mut self) -> Tensor<1> {
        self.own
            .take()
            .unwrap_or_else(|| self.zeros(self.num_elements()))
    }

    /// Whether this rank's own gradient is a view of `buffer` that begins at `start`.
    pub(crate) fn is_view_of(&self, buffer: &Tensor<1>, start: usize) -> bool {
        let Ok(shape) = <[usize; 2]>::try_from(self.spec.shard.local_shape()) else {
            return false;
        };
        let own = self.own.as_ref().map(|own| own.clone().reshape(shape));
        own.is_some_and(|own| is_view_of(&own, buffer, start))
    }

    /// Adds a sum over ranks of the part that this rank keeps.
    pub(crate) fn add(&mut self, part: Tensor<1>) {
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + part,
            None => part,
        });
    }

    /// The part of the gradient that this rank keeps; `None` if it is zero.
    pub(crate) fn grad(&self) -> Option<Tensor<1>> {
        let own = || {
            Some(
                self.own
                    .clone()?
                    .narrow(0, self.kept.start, self.kept.len()),
            )
        };
        self.sum.clone().or_else(own)
    }

    /// Like [`grad`](Self::grad), with zeros for `None`.
    pub(crate) fn grad_or_zeros(&self) -> Tensor<1> {
        self.grad().unwrap_or_else(|| self.zeros(self.kept.len()))
    }

    fn zeros(&self, len: usize) -> Tensor<1> {
        Tensor::zeros([len], (&self.device, self.dtype))
    }
}
