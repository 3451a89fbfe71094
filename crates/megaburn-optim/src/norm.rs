use std::collections::BTreeSet;

use burn::tensor::{DType, Tensor};
use megaburn_kernels::is_on_gpu;

use crate::{
    accumulator::GradientAccumulator,
    device_scalar::{DeviceScalar, Value},
    error::OptimError,
    norm_partials::{GradNormPartials, owned_squares},
    param_grad::ParamGrad,
    sharding::ParamKind,
};

/// The L2 norm of a gradient. On GPUs the host has not waited for it.
#[derive(Clone, Debug)]
pub struct GradNorm {
    pub(crate) squares: DeviceScalar,
    /// The pending scale of the gradient, which `squares` does not include.
    pub(crate) factor: f64,
}

impl GradNorm {
    /// The value; on a GPU the host waits for it.
    ///
    /// # Errors
    /// See [`DeviceScalar::read`].
    pub fn read(&self) -> Result<f64, OptimError> {
        Ok(self.squares.read()?.sqrt() * self.factor)
    }

    /// The value, and whether it is above `threshold`. The comparison is bit for bit the one of
    /// [`GradientAccumulator::skip_above`].
    ///
    /// # Errors
    /// See [`DeviceScalar::read`].
    pub fn read_against(&self, threshold: f64) -> Result<(f64, bool), OptimError> {
        let squares = self.squares.read()?;
        let is_above = squares > f64::from(self.square_of(threshold));
        Ok((squares.sqrt() * self.factor, is_above))
    }

    /// The sum of squares that corresponds to `norm`, in f32, as a GPU compares it.
    pub(crate) fn square_of(&self, norm: f64) -> f32 {
        (norm / self.factor).powi(2) as f32
    }
}

impl GradientAccumulator {
    /// The L2 norm of the model's full gradient, counting each logical element once however many
    /// ranks hold copies, and no padding. Call it after [`GradientAccumulator::reduce`].
    ///
    /// A non-finite value anywhere, in an uncounted copy too, makes the norm non-finite on every
    /// rank.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// One number over all ranks that together hold the model, or shares of it. If this rank's
    /// stage has experts, it is preceded by one number over all ranks that together hold those
    /// experts, or shares of them.
    /// # Determinism
    /// On CPUs the sum is taken in f64, in path order and then rank order. On GPUs, squares are
    /// summed in f32 over chunks, and the chunks in f64. Either way the result is bit-identical on
    /// every rank of the world.
    pub fn norm(&self) -> Result<GradNorm, OptimError> {
        self.norm_on(self.is_on_gpu())
    }

    /// Implements [`norm`](Self::norm); with `gpu` the sums stay on the device and none is read.
    pub(crate) fn norm_on(&self, gpu: bool) -> Result<GradNorm, OptimError> {
        let squares = self.squares(gpu, |_, entry| entry.grad())?;
        Ok(GradNorm {
            squares,
            factor: self.factor,
        })
    }

    /// The sum of squares of what `of` returns for each parameter, restricted to what this rank
    /// keeps and counting each logical element once. `None` counts as zero.
    pub(crate) fn squares(
        &self,
        gpu: bool,
        of: impl Fn(&str, &ParamGrad) -> Option<Tensor<1>>,
    ) -> Result<DeviceScalar, OptimError> {
        if !self.sharding.has(ParamKind::Expert) {
            return self.squares_of(ParamKind::Dense, gpu, of, None);
        }
        // Stages need not know whether other stages have experts. One rank of this stage adds the
        // experts' sum; the others add zero, or NaN if the sum is not finite.
        let experts = self.squares_of(ParamKind::Expert, gpu, &of, None)?;
        let factor = if self.sharding.counts_experts() {
            1.0
        } else {
            0.0
        };
        self.squares_of(ParamKind::Dense, gpu, of, Some(experts.value.times(factor)))
    }

    /// The sum of squares over the parameters of one kind, plus this rank's `more`.
    fn squares_of(
        &self,
        kind: ParamKind,
        gpu: bool,
        of: impl Fn(&str, &ParamGrad) -> Option<Tensor<1>>,
        more: Option<Value>,
    ) -> Result<DeviceScalar, OptimError> {
        let group = self.sharding.replicas(kind).norm();
        let entries = self
            .entries
            .iter()
            .filter(|(path, _)| self.sharding.kind_of(path) == kind);
        let entries = entries.map(|(path, entry)| (entry, of(path, entry)));
        if !gpu {
            let squares = entries.filter_map(|(entry, values)| Some(owned_squares(entry, values?)));
            let more = more.and_then(Value::known);
            return DeviceScalar::known(squares.chain(more).sum(), group);
        }
        let mut sums = GradNormPartials::default();
        entries.for_each(|(entry, values)| sums.add(entry, values));
        let sums = sums
            .finish()
            .into_iter()
            .chain(more.and_then(Value::on_gpu));
        DeviceScalar::on_gpu(Tensor::cat(sums.collect(), 0), group)
    }

    /// Whether this rank's parameters are on a GPU. All of them are on the same device.
    pub(crate) fn is_on_gpu(&self) -> bool {
        let first = self.entries.values().next();
        first.is_some_and(|entry| is_on_gpu(&Tensor::<1>::empty([1], &entry.device)))
    }

    /// The paths of non-finite gradients, among those that this rank has not yet summed over ranks,
    /// to locate the cause. Call it before [`GradientAccumulator::end_micro_batch`].
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn find_non_finite(&mut self) -> Result<BTreeSet<&str>, OptimError> {
        self.gather();
        let grads = self
            .entries
            .iter()
            .filter_map(|(path, entry)| Some((path, entry.own.clone()?)));
        // Zero or NaN per gradient, computed on the device and read in one transfer.
        let poison = |grad: Tensor<1>| grad.cast(DType::F32).mul_scalar(0.0).sum();
        let (paths, sums): (Vec<_>, Vec<_>) =
            grads.map(|(path, g)| (path.as_str(), poison(g))).unzip();
        if sums.is_empty() {
            return Ok(BTreeSet::new());
        }
        let sums = Tensor::cat(sums, 0).try_into_data();
        let sums = sums.map_err(|error| OptimError::Device {
            why: error.to_string(),
        })?;
        let sums: Vec<f32> = sums.try_to_vec().expect("the tensor is f32");
        Ok(paths
            .into_iter()
            .zip(sums)
            .filter(|(_, sum)| sum.is_nan())
            .map(|(path, _)| path)
            .collect())
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
        sharding::{Sharding, ShardingConfig, ShardingLevel},
        testing::{Net, cut, plan_of},
    };

    /// A gradient of the full model, whose largest element is far above the others.
    fn whole(path: &str, len: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7 + path.len() * 3) % 11) as f32 * 0.37 - 1.5)
            .collect()
    }

    /// The norm on every rank under a layout; `spoil` may change what a rank holds.
    fn norms(
        layout: &str,
        level: ShardingLevel,
        on_gpu: bool,
        spoil: impl Fn(usize, &mut Vec<f32>) + Sync,
    ) -> Vec<f64> {
        let layout: Layout = layout.parse().unwrap();
        let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, layout)?;
            let rank = groups.tp.rank();
            let tp = groups.tp.size();
            let device = Device::default().autodiff();
            let net = Net::new(5, 120, rank, tp, &device);
            let plan = plan_of(5, 120, rank, tp);
            let sharding = ShardingConfig::new(level).init(&net, &groups)?;
            let mut grads = GradientAccumulator::new(&net, &plan, &sharding)?;
            for (path, entry) in &mut grads.entries {
                let shard = &plan.get(path).unwrap().shard;
                let mut local = cut(shard, &whole(path, shard.num_global()));
                spoil(world.rank(), &mut local);
                let local = Tensor::from_floats(local.as_slice(), &device.clone().inner());
                entry.sum = Some(local.slice([entry.kept.clone()]));
            }
            grads.norm_on(on_gpu)?.read()
        });
        ranks.into_iter().map(Result::unwrap).collect()
    }

    #[rstest]
    #[case("dp1", ShardingLevel::None)]
    #[case("tp2", ShardingLevel::None)]
    #[case("tp4", ShardingLevel::None)]
    #[case("tp2-dp2", ShardingLevel::None)]
    #[case("tp2-dp2", ShardingLevel::Optimizer)]
    #[case("dp3", ShardingLevel::Optimizer)]
    #[case("tp4-dp2", ShardingLevel::Gradients)]
    #[case("tp3", ShardingLevel::None)]
    fn each_logical_element_counts_once_on_every_rank(
        #[case] layout: &str,
        #[case] level: ShardingLevel,
        #[values((false, 1e-12), (true, 1e-6))] (on_gpu, tolerance): (bool, f64),
    ) {
        let elements = [whole("matrix", 600), whole("bias", 120)].concat();
        let expected = elements
            .iter()
            .map(|&g| f64::from(g).powi(2))
            .sum::<f64>()
            .sqrt();
        let norms = norms(layout, level, on_gpu, |_, _| {});
        assert!(
            (norms[0] - expected).abs() < tolerance * expected,
            "{} {expected}",
            norms[0]
        );
        assert!(
            norms
                .iter()
                .all(|norm| norm.to_bits() == norms[0].to_bits()),
            "{norms:?}"
        );
    }

    #[rstest]
    fn a_bad_value_in_an_uncounted_copy_spoils_the_norm_of_all(
        #[values(f32::NAN, f32::INFINITY)] bad: f32,
        #[values(false, true)] on_gpu: bool,
    ) {
        // Under tp4 the bias has two units: rank 1 holds a copy of what rank 0 owns.
        let norms = norms("tp4", ShardingLevel::None, on_gpu, |rank, local| {
            if rank == 1 && local.len() == 60 {
                local[2] = bad;
            }
        });
        assert!(norms.iter().all(|norm| !norm.is_finite()), "{norms:?}");
    }

    #[test]
    fn bad_gradients_are_named() {
        let device = Device::default().autodiff();
        let net = Net::new(3, 4, 0, 1, &device);
        let plan = plan_of(3, 4, 0, 1);
        let mut grads = GradientAccumulator::new(&net, &plan, &Sharding::none()).unwrap();
        assert!(grads.find_non_finite().unwrap().is_empty());
        let loss = net.matrix.val().sum().mul_scalar(f32::MAX).mul_scalar(2.0);
        grads.accumulate(&net, &mut loss.backward());
        assert!(grads.find_non_finite().unwrap().into_iter().eq(["matrix"]));
        assert!(!grads.norm().unwrap().read().unwrap().is_finite());
    }
}
