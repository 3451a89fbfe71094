use std::collections::BTreeMap;

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::DType,
};

use crate::{
    accumulator::GradientAccumulator,
    device_scalar::DeviceScalar,
    error::OptimError,
    leaf::flat,
    norm::GradNorm,
    sharding::Sharding,
    visit::{FloatVisitor, visit_floats},
};

impl GradientAccumulator {
    /// The number of zero elements in the model's gradient, counting each logical element once and
    /// no padding. It is an integer; on GPUs it has seven digits. Call it after
    /// [`GradientAccumulator::reduce`].
    ///
    /// Source: Megatron-LM `megatron/core/optimizer/clip_grads.py`, `count_zeros_fp32`.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// As [`GradientAccumulator::norm`].
    pub fn num_zeros(&self) -> Result<DeviceScalar, OptimError> {
        self.num_zeros_on(self.is_on_gpu())
    }

    fn num_zeros_on(&self, gpu: bool) -> Result<DeviceScalar, OptimError> {
        // The sum of squares of zeros and ones is the number of ones.
        self.squares(gpu, |_, entry| {
            let is_kept = !entry.kept.is_empty();
            is_kept.then(|| entry.grad_or_zeros().equal_elem(0.0).float())
        })
    }

    /// The L2 norm of the parameters of `module` that have gradients, counting each logical element
    /// once. Narrow parameters are read as they are, not their masters. All parameters must have
    /// arrived ([`Sharding::settle`](crate::Sharding::settle)).
    ///
    /// Source: Megatron-LM `megatron/training/utils.py`, `calc_params_l2_norm`.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// As [`GradientAccumulator::norm`].
    pub fn params_norm<M: Module>(&self, module: &M) -> Result<GradNorm, OptimError> {
        self.params_norm_on(self.is_on_gpu(), module)
    }

    fn params_norm_on<M: Module>(&self, gpu: bool, module: &M) -> Result<GradNorm, OptimError> {
        let mut params = Params {
            sharding: &self.sharding,
            values: BTreeMap::new(),
        };
        visit_floats(module, &mut params);
        let squares = self.squares(gpu, |path, entry| {
            let kept = &entry.kept;
            if kept.is_empty() {
                return None;
            }
            if let Some(part) = self.sharding.part(path) {
                return Some(part.cast(DType::F32));
            }
            let values = params.values.get(path)?;
            Some(
                values
                    .clone()
                    .narrow(0, kept.start, kept.len())
                    .cast(DType::F32),
            )
        })?;
        Ok(GradNorm {
            squares,
            factor: 1.0,
        })
    }
}

/// Values by path, for the parameters that this rank holds in full.
pub(crate) struct Params<'a> {
    pub(crate) sharding: &'a Sharding,
    pub(crate) values: BTreeMap<String, Tensor<1>>,
}

impl FloatVisitor for Params<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if !self.sharding.is_param_sharded(&path) {
            self.values.insert(path, flat(param.val()));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
    use megaburn_mesh::Layout;
    use rstest::rstest;

    use super::*;
    use crate::{
        sharding::{ShardingConfig, ShardingLevel},
        testing::{Net, cut, plan_of},
    };

    /// Five rows of 120, padded where ranks split them. Every third element is zero.
    #[rstest]
    #[case("dp1", ShardingLevel::None)]
    #[case("tp2", ShardingLevel::None)]
    #[case("tp4-dp2", ShardingLevel::Optimizer)]
    #[case("dp3", ShardingLevel::Gradients)]
    fn zeros_and_the_norm_of_parameters_count_each_logical_element_once(
        #[case] layout: &str,
        #[case] level: ShardingLevel,
        #[values((false, 1e-12), (true, 1e-6))] (on_gpu, tolerance): (bool, f64),
    ) {
        let layout: Layout = layout.parse().unwrap();
        let whole = |len: usize| -> Vec<f32> { (0..len).map(|i| (i % 3) as f32).collect() };
        let found = run_threads(layout.world_size(), GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let rank = groups.tp.rank();
            let tp = groups.tp.size();
            let device = Device::default().autodiff();
            let mut net = Net::new(5, 120, rank, tp, &device);
            let plan = plan_of(5, 120, rank, tp);
            let local = |path: &str| {
                let shard = &plan.get(path).unwrap().shard;
                let local = cut(shard, &whole(shard.num_global()));
                Tensor::<1>::from_floats(local.as_slice(), &device.clone().inner())
            };
            let matrix = local("matrix");
            net.matrix = net.matrix.map(|old| {
                let new = matrix.clone().reshape(old.dims());
                Tensor::from_inner(new).require_grad()
            });
            net.bias = net
                .bias
                .map(|_| Tensor::from_inner(local("bias")).require_grad());
            let sharding = ShardingConfig::new(level).init(&net, &groups)?;
            let mut grads = GradientAccumulator::new(&net, &plan, &sharding)?;
            // The bias has no gradient, so all its elements count as zero.
            let entry = grads.entries.get_mut("matrix").unwrap();
            entry.sum = Some(matrix.slice([entry.kept.clone()]));
            let zeros = grads.num_zeros_on(on_gpu)?.read()?;
            Ok::<_, OptimError>((zeros, grads.params_norm_on(on_gpu, &net)?.read()?))
        });
        let squares = |len| whole(len).iter().map(|x| f64::from(x * x)).sum::<f64>();
        let norm = (squares(600) + squares(120)).sqrt();
        for found in found {
            let (zeros, found) = found.unwrap();
            assert_eq!(zeros, 200.0 + 120.0);
            assert!((found - norm).abs() <= tolerance * norm, "{found} {norm}");
        }
    }
}
