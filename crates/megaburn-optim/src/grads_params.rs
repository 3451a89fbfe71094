//! Gradients as Burn's optimizers take them.

use std::collections::BTreeSet;

use burn::{
    Tensor,
    module::{Module, Param},
    optim::GradientsParams,
};

use crate::{
    accumulator::GradientAccumulator,
    visit::{FloatVisitor, visit_floats},
};

impl GradientAccumulator {
    /// Adds the gradients that a [`TrainStep`](https://docs.rs/burn-train) returned, each multiplied
    /// by `factor`. Like [`accumulate`](Self::accumulate) otherwise.
    pub fn accumulate_params<M: Module>(
        &mut self,
        module: &M,
        mut grads: GradientsParams,
        factor: f64,
    ) {
        let mut add = AddParams {
            sums: self,
            grads: &mut grads,
            factor,
        };
        visit_floats(module, &mut add);
        self.end_backward();
    }

    /// The paths of the parameters that got a gradient on this rank since the last
    /// [`reset`](Self::reset). Call it before [`reduce`](Self::reduce).
    pub fn received(&self) -> BTreeSet<String> {
        let entries = self.entries.iter();
        let received = entries.filter(|(_, entry)| entry.own.is_some());
        received.map(|(path, _)| path.clone()).collect()
    }

    /// The gradients of the parameters for which `is_wanted`, in the parameters' types, for one of
    /// Burn's optimizers. `module` is the one that this was made for, or a later version of it.
    ///
    /// With sharded gradients a rank has only parts, so call it with
    /// [`ShardingLevel::None`](crate::ShardingLevel::None).
    ///
    /// # Panics
    /// If gradients are sharded.
    pub fn to_params<M: Module>(
        &self,
        module: &M,
        is_wanted: impl Fn(&str) -> bool,
    ) -> GradientsParams {
        let mut taken = ToParams {
            sums: self,
            is_wanted,
            grads: GradientsParams::new(),
        };
        visit_floats(module, &mut taken);
        taken.grads
    }
}

struct AddParams<'a> {
    sums: &'a mut GradientAccumulator,
    grads: &'a mut GradientsParams,
    factor: f64,
}

impl FloatVisitor for AddParams<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let Some(entry) = self.sums.entries.get_mut(&path) else {
            return;
        };
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let grad = grad.cast(entry.dtype).mul_scalar(self.factor);
        let grad = grad.reshape([-1]);
        entry.own = Some(match entry.own.take() {
            Some(own) => own + grad,
            None => grad,
        });
    }
}

struct ToParams<'a, F> {
    sums: &'a GradientAccumulator,
    is_wanted: F,
    grads: GradientsParams,
}

impl<F: Fn(&str) -> bool> FloatVisitor for ToParams<'_, F> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if !(self.is_wanted)(&path) {
            return;
        }
        let Some(grad) = self.sums.get(&path) else {
            return;
        };
        let value = param.val();
        let shape = value.shape();
        assert_eq!(
            grad.shape().num_elements(),
            shape.num_elements(),
            "the gradient of `{path}` is sharded"
        );
        let grad = grad.reshape(shape).cast(value.dtype());
        self.grads.register::<D>(param.id, grad);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::{
        sharding::Sharding,
        testing::{Net, plan_of, values},
    };

    #[test]
    fn gradients_of_micro_batches_come_back_as_weighted_sums() {
        let device = Device::flex().autodiff();
        let net = Net::new(3, 4, 0, 1, &device);
        let plan = plan_of(3, 4, 0, 1);
        let mut sums = GradientAccumulator::new(&net, &plan, &Sharding::none()).unwrap();
        for (scale, factor) in [(1.0f32, 0.25), (3.0, 0.75)] {
            let loss = net.matrix.val().sum().mul_scalar(scale);
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            sums.accumulate_params(&net, grads, factor);
        }
        assert_eq!(sums.received(), BTreeSet::from(["matrix".to_owned()]));
        sums.reduce().unwrap();
        let mut grads = sums.to_params(&net, |path| path == "matrix");
        assert_eq!(grads.len(), 1);
        let matrix = grads.remove::<2>(net.matrix.id).unwrap();
        assert_eq!(matrix.dims(), net.matrix.val().dims());
        assert_eq!(values(matrix.reshape([-1])), [2.5; 12]);
        // Parameters that got none have zeros, if they are wanted.
        let mut all = sums.to_params(&net, |_| true);
        assert_eq!(values(all.remove::<1>(net.bias.id).unwrap()), [0.0; 4]);
    }
}
