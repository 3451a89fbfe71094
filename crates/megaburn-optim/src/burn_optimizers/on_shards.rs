use burn::{
    grad_clipping::GradientClipping,
    optim::{LearningRate, Optimizer},
    prelude::Device,
    tensor::{DType, FloatDType, Tensor},
};
use megaburn_collective::{Lane, ParamShards, ReduceOp, region::unwrap_collective, tensors};

use super::reads::{Reads, ShardRule};

/// An optimizer of Burn for one parameter that is split over ranks. Burn asks an optimizer for one
/// parameter at a time without naming it, so each split parameter has one of these.
#[derive(Clone)]
pub(super) struct OnShards<O> {
    pub(super) optimizer: O,
    pub(super) shards: ParamShards,
    pub(super) clipping: Option<GradientClipping>,
}

impl<O: ShardRule> Optimizer for OnShards<O> {
    type State<const D: usize> = O::State<D>;

    /// # Panics
    /// If a collective fails.
    /// # Collective
    /// All members of the group: two all-gathers if the optimizer reads the full parameter, and an
    /// all-reduce of one number if gradients are clipped by norm.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let grad = self.clipped(grad);
        if O::READS == Reads::Element {
            return self.optimizer.step(lr, tensor, grad, state);
        }
        let full = |local| unwrap_collective(self.shards.gather(local));
        let (tensor, grad) = (full(tensor), full(grad));
        let (tensor, state) = self.optimizer.step(lr, tensor, grad, state);
        (self.shards.part(tensor), state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        O::to_device(state, device)
    }
}

impl<O> OnShards<O> {
    /// The gradient, clipped as that of the full parameter.
    fn clipped<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        match &self.clipping {
            Some(GradientClipping::Norm(max)) => self.clipped_by_norm(grad, *max),
            Some(by_value) => by_value.clip_gradient(grad),
            None => grad,
        }
    }

    /// As Burn's `GradientClipping::Norm`, by the norm of the full gradient.
    fn clipped_by_norm<const D: usize>(&self, grad: Tensor<D>, max: f32) -> Tensor<D> {
        let dtype = grad.dtype();
        let grad = match dtype {
            DType::F16 | DType::BF16 => grad.cast(FloatDType::F32),
            _ => grad,
        };
        let spec = self.shards.own();
        let mut sum = Tensor::<1>::zeros([1], (&grad.device(), grad.dtype()));
        for piece in spec.owned() {
            let part = grad
                .clone()
                .narrow(spec.dim, piece.local.start, piece.local.len());
            sum = sum + part.square().sum();
        }
        let group = self.shards.group();
        let sum = tensors::all_reduce(sum, ReduceOp::Sum, group, Lane::InOrder);
        let norm = unwrap_collective(sum).wait().sqrt();
        let smallest = grad
            .dtype()
            .finfo()
            .unwrap_or(FloatDType::F32.finfo())
            .min_positive;
        let factor = (norm.add_scalar(smallest).recip() * max).clamp_max(1.0);
        grad.mul(factor.unsqueeze()).cast(dtype)
    }
}
