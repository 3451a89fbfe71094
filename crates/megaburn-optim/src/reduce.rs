use std::collections::BTreeMap;

use burn::Tensor;
use megaburn_mesh::ShardSpec;

use crate::{
    accumulator::GradientAccumulator,
    error::OptimError,
    param_grad::ParamGrad,
    sharding::{Bucket, GradReduceQueue, ShardingLevel, Slot},
};

impl GradientAccumulator {
    /// Announces the backward pass of a micro-batch. `is_last` says whether it is the last one of
    /// the step for its stage. If it is, [main gradients](Self::with_main_grads) are sent during
    /// backward as soon as they are complete, from the second micro-batch of a run on. Without this
    /// call, [`reduce`](Self::reduce) sends all gradients.
    ///
    /// # Collective
    /// All data- and context-parallel ranks, and thus all ranks that hold the same experts. They
    /// must then run the same backward pass.
    pub fn begin_micro_batch(&mut self, is_last: bool) {
        if let Some(overlap) = &self.overlap {
            overlap.begin(is_last || self.sharding.level() >= ShardingLevel::Gradients);
        }
    }

    /// Where gradients are sharded, sums those accumulated since the last call over the ranks that
    /// hold the same parameters, and keeps this rank's shard. Does nothing otherwise. Call it after
    /// each micro-batch.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// As [`reduce`](Self::reduce).
    pub fn end_micro_batch(&mut self) -> Result<(), OptimError> {
        match self.sharding.level() {
            ShardingLevel::None | ShardingLevel::Optimizer => Ok(()),
            // A backward pass of one pipeline stage gives no gradients to the weights of another.
            ShardingLevel::Gradients | ShardingLevel::Parameters => self.reduce_own(true),
        }
    }

    /// Sums the gradients over the ranks that hold the same parameters, and keeps this rank's
    /// shard. Gradients of padding become zero. Call it after the last micro-batch.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// All data- and context-parallel ranks; for experts, all ranks that hold the same ones. Every
    /// gradient is sent, in buckets, in the order in which backward produces them.
    /// # Determinism
    /// On CPUs the sum is in rank order, so what a rank keeps is bit-identical to the result
    /// without sharding.
    pub fn reduce(&mut self) -> Result<(), OptimError> {
        // A micro-batch without `end_micro_batch` is summed now, on every rank.
        match self.sharding.level() {
            ShardingLevel::Gradients | ShardingLevel::Parameters if !self.is_open => Ok(()),
            _ => self.reduce_own(false),
        }
    }

    /// Reduces all buckets, or, with `only_some`, those that got a gradient on this rank. All ranks
    /// must then have gradients for the same buckets.
    fn reduce_own(&mut self, only_some: bool) -> Result<(), OptimError> {
        self.is_open = false;
        self.sharding.check()?;
        let mut shares = match &self.overlap {
            Some(overlap) => overlap.take()?,
            None => BTreeMap::new(),
        };
        self.gather();
        for ParamGrad { spec, own, .. } in self.entries.values_mut() {
            *own = own.take().map(|own| without_padding(&spec.shard, own));
        }
        let sharding = self.sharding.clone();
        let is_alone = |kind| sharding.replicas(kind).is_alone();
        let alone = self
            .entries
            .iter_mut()
            .filter(|(path, _)| is_alone(sharding.kind_of(path)));
        for (_, entry) in alone {
            if let Some(own) = entry.own.take() {
                entry.add(own);
            }
        }
        let mut rest = Vec::new();
        let sent = sharding
            .buckets()
            .iter()
            .enumerate()
            .filter(|(_, b)| !is_alone(b.kind));
        for (index, bucket) in sent {
            let Some(share) = shares.remove(&index) else {
                rest.push(bucket);
                continue;
            };
            if let Some(late) = bucket
                .slots
                .iter()
                .find(|slot| self.entry(slot).own.is_some())
            {
                return Err(OptimError::LateGradient {
                    path: late.path.clone(),
                });
            }
            self.add_share(bucket, share);
        }
        let mut sums = GradReduceQueue::new(sharding.clone());
        if only_some {
            let has_some = |slot: &Slot| self.entries[&slot.path].own.is_some();
            rest.retain(|bucket| bucket.slots.iter().any(has_some));
        }
        for bucket in &rest {
            sums.start(bucket.kind, self.take_own(bucket))?;
        }
        for (bucket, share) in rest.into_iter().zip(sums.finish()?) {
            self.add_share(bucket, share);
        }
        Ok(())
    }

    /// This rank's own gradients of a bucket: the buffer itself if they are in place, joined
    /// otherwise.
    fn take_own(&mut self, bucket: &Bucket) -> Tensor<1> {
        let buffer = self
            .overlap
            .as_ref()
            .and_then(|overlap| overlap.take_buffer(bucket));
        let stands = |buffer: &Tensor<1>| {
            bucket
                .slots
                .iter()
                .all(|slot| self.entries[&slot.path].is_view_of(buffer, slot.start))
        };
        if let Some(buffer) = buffer.filter(stands) {
            bucket
                .slots
                .iter()
                .for_each(|slot| self.entry(slot).own = None);
            return buffer;
        }
        let first = self.entry(&bucket.slots[0]);
        let place = (first.device.clone(), first.dtype);
        let zeros = |len| Tensor::zeros([len], (&place.0, place.1));
        bucket.join(0..bucket.len, |slot, _| self.entry(slot).take_own(), zeros)
    }

    /// Adds a sum over ranks of this rank's shard of a bucket.
    fn add_share(&mut self, bucket: &Bucket, share: Tensor<1>) {
        let start = self.sharding.shard_of(bucket).start;
        for slot in &bucket.slots {
            let entry = self.entry(slot);
            let kept = entry.kept.clone();
            if !kept.is_empty() {
                let at = slot.start + kept.start - start;
                entry.add(share.clone().narrow(0, at, kept.len()));
            }
        }
    }

    fn entry(&mut self, slot: &Slot) -> &mut ParamGrad {
        self.entries
            .get_mut(&slot.path)
            .expect("the sharding was made for the same module")
    }
}

/// Whether a shard is longer than the part of the model that it holds.
pub(crate) fn has_padding(shard: &ShardSpec) -> bool {
    num_held(shard) < shard.local_len
}

/// How much of its split dimension a shard fills with the model, without padding.
fn num_held(shard: &ShardSpec) -> usize {
    shard
        .pieces
        .iter()
        .map(|piece| piece.local.end)
        .max()
        .unwrap_or(0)
}

/// Clears the gradient of padding. Padding belongs to no element of the model, and with a zero
/// gradient it stays zero.
pub(crate) fn without_padding(shard: &ShardSpec, grad: Tensor<1>) -> Tensor<1> {
    if !has_padding(shard) {
        return grad;
    }
    let inner: usize = shard.global_shape.iter().skip(shard.dim + 1).product();
    let held = num_held(shard);
    let row = shard.local_len * inner;
    let shape = grad.shape();
    let outer = shape.num_elements() / row;
    grad.reshape([outer, row])
        .slice_fill([0..outer, held * inner..row], 0.0)
        .reshape(shape)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
    use megaburn_mesh::Layout;
    use rstest::rstest;

    use super::*;
    use crate::{
        sharding::ShardingConfig,
        testing::{Net, plan_of, values},
    };

    #[rstest]
    #[case("dp1", None)]
    #[case("dp2", None)]
    #[case("dp3", Some(20))]
    #[case("dp3", Some(1))]
    fn gradients_are_summed_over_ranks_whatever_the_bucket(
        #[case] layout: &str,
        #[case] bucket: Option<usize>,
    ) {
        let layout: Layout = layout.parse().unwrap();
        let ranks = layout.world_size();
        let results = run_threads(ranks, GroupOptions::default(), |world| {
            let device = Device::default().autodiff();
            let net = Net::new(3, 6, 0, 1, &device);
            let groups = ProcessGroups::new(&world, layout)?;
            let config = ShardingConfig::new(ShardingLevel::None).with_bucket(bucket);
            let sharding = config.init(&net, &groups)?;
            let mut sum = GradientAccumulator::new(&net, &plan_of(3, 6, 0, 1), &sharding)?;
            let mine = (world.rank() + 1) as f32;
            let loss = net.matrix.val().sum().mul_scalar(mine)
                + net.bias.val().sum().mul_scalar(10.0 * mine);
            sum.accumulate(&net, &mut loss.backward());
            sum.reduce()?;
            Ok::<_, OptimError>(["matrix", "bias"].map(|path| values(sum.get(path).unwrap())))
        });
        let total = (ranks * (ranks + 1) / 2) as f32;
        for result in results {
            assert_eq!(result.unwrap(), [vec![total; 18], vec![10.0 * total; 6]]);
        }
    }

    #[test]
    fn the_gradient_of_padding_is_cleared() {
        // 5 rows padded to 8 over 2 ranks: the second rank holds one row and three of padding.
        let results = run_threads(2, GroupOptions::default(), |world| {
            let groups = ProcessGroups::new(&world, "tp2".parse().unwrap())?;
            let device = Device::default().autodiff();
            let rank = world.rank();
            let net = Net::new(5, 6, rank, 2, &device);
            let sharding = ShardingConfig::new(ShardingLevel::None).init(&net, &groups)?;
            let mut sum = GradientAccumulator::new(&net, &plan_of(5, 6, rank, 2), &sharding)?;
            sum.accumulate(&net, &mut net.matrix.val().sum().backward());
            sum.reduce()?;
            Ok::<_, OptimError>(values(sum.get("matrix").unwrap()))
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(results[0], [1.0; 24]);
        assert_eq!(
            results[1],
            [[1.0; 6], [0.0; 6], [0.0; 6], [0.0; 6]].concat()
        );
    }
}
