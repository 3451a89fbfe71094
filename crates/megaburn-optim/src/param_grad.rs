use std::ops::Range;

use burn::{
    Tensor,
    tensor::{DType, Device},
};
use megaburn_kernels::{MainGrad, is_view_of};
use megaburn_mesh::ParamSpec;

/// One parameter's sums, flat; none for zero.
#[derive(Debug)]
pub(crate) struct ParamGrad {
    pub(crate) spec: ParamSpec,
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    /// What of the local parameter this rank keeps the sum over ranks of.
    pub(crate) kept: Range<usize>,
    /// This rank's own, which was not summed over ranks yet: `[local elements]`.
    pub(crate) own: Option<Tensor<1>>,
    /// Summed over ranks: `[kept]`.
    pub(crate) sum: Option<Tensor<1>>,
    /// Where the layer that uses the parameter sums a part of its gradient, or all.
    pub(crate) main_grad: Option<MainGrad>,
}

impl ParamGrad {
    pub(crate) fn num_elements(&self) -> usize {
        self.spec.shard.local_shape().iter().product()
    }

    /// Takes what the layer summed.
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

    /// Takes this rank's own gradient, zeros if there was none.
    pub(crate) fn take_own(&mut self) -> Tensor<1> {
        self.own
            .take()
            .unwrap_or_else(|| self.zeros(self.num_elements()))
    }

    /// Whether this rank's own gradient is this stretch of a bucket's memory.
    pub(crate) fn is_view_of(&self, buffer: &Tensor<1>, start: usize) -> bool {
        let Ok(shape) = <[usize; 2]>::try_from(self.spec.shard.local_shape()) else {
            return false;
        };
        let own = self.own.as_ref().map(|own| own.clone().reshape(shape));
        own.is_some_and(|own| is_view_of(&own, buffer, start))
    }

    /// Adds what ranks have summed of what this one keeps.
    pub(crate) fn add(&mut self, part: Tensor<1>) {
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + part,
            None => part,
        });
    }

    /// What this rank keeps of the gradient, if it is not zero.
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

    /// The same, zeros if there was none.
    pub(crate) fn grad_or_zeros(&self) -> Tensor<1> {
        self.grad().unwrap_or_else(|| self.zeros(self.kept.len()))
    }

    fn zeros(&self, len: usize) -> Tensor<1> {
        Tensor::zeros([len], (&self.device, self.dtype))
    }
}
