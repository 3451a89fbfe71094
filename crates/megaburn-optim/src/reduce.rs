use burn::Tensor;
use megaburn_collective::{Group, ReduceOp, tensors};

use crate::{GradientAccumulator, OptimError, accumulator::Entry};

/// Elements (16 MiB of f32) that are reduced at once: bounds the memory beside the gradients.
const BUCKET: usize = 4 << 20;

impl GradientAccumulator {
    /// Sums the gradients over the ranks that hold the same shards, and sets the gradients of
    /// padding to zero.
    ///
    /// # Errors
    /// See [`megaburn_collective::CollectiveError`].
    /// # Collective
    /// All members of `group` (dp x cp); sends every gradient, in path order, in buckets of 4 Mi
    /// elements.
    pub fn reduce(&mut self, group: &Group) -> Result<(), OptimError> {
        self.reduce_by(group, BUCKET)
    }

    fn reduce_by(&mut self, group: &Group, bucket: usize) -> Result<(), OptimError> {
        self.gather();
        if group.size() > 1 {
            let mut entries: Vec<&mut Entry> = self.entries.values_mut().collect();
            let mut rest = entries.as_mut_slice();
            while !rest.is_empty() {
                let (now, later) = rest.split_at_mut(bucket_len(rest, bucket));
                reduce_bucket(now, group)?;
                rest = later;
            }
        }
        self.entries.values_mut().for_each(clear_padding);
        Ok(())
    }
}

/// How many of the next entries fit into a bucket; at least one.
fn bucket_len(entries: &[&mut Entry], bucket: usize) -> usize {
    let mut sum = 0;
    let fits = entries.iter().take_while(|entry| {
        sum += entry.num_elements();
        sum <= bucket
    });
    fits.count().max(1)
}

fn reduce_bucket(entries: &mut [&mut Entry], group: &Group) -> Result<(), OptimError> {
    let flat = Tensor::cat(entries.iter_mut().map(|entry| take(entry)).collect(), 0);
    let sum = tensors::all_reduce(flat, ReduceOp::Sum, group)?;
    let mut start = 0;
    for entry in entries {
        let len = entry.num_elements();
        entry.grad = Some(sum.clone().narrow(0, start, len));
        start += len;
    }
    Ok(())
}

/// The gradient, leaving none: the bucket holds it now.
fn take(entry: &mut Entry) -> Tensor<1> {
    let flat = entry.flat();
    entry.grad = None;
    flat
}

/// Padding belongs to no element of the model: with a zero gradient it stays zero for ever.
fn clear_padding(entry: &mut Entry) {
    let shard = &entry.spec.shard;
    let held = shard.pieces.iter().map(|piece| piece.local.end).max().unwrap_or(0);
    let inner: usize = shard.global_shape.iter().skip(shard.dim + 1).product();
    let row = shard.local_len * inner;
    if held * inner == row {
        return;
    }
    entry.grad = entry.grad.take().map(|grad| {
        let shape = grad.shape();
        let outer = shape.num_elements() / row;
        grad.reshape([outer, row]).slice_fill([0..outer, held * inner..row], 0.0).reshape(shape)
    });
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
    use rstest::rstest;

    use super::*;
    use crate::testing::{Net, plan_of, values};

    #[rstest]
    #[case(1, BUCKET)]
    #[case(2, BUCKET)]
    #[case(3, 7)]
    #[case(3, 1)]
    fn gradients_are_summed_over_ranks_whatever_the_bucket(
        #[case] ranks: usize,
        #[case] bucket: usize,
    ) {
        let results = run_threads(ranks, GroupOptions::default(), |world| {
            let device = Device::default().autodiff();
            let net = Net::new(3, 6, 0, 1, &device);
            let mut sum = GradientAccumulator::new(&net, &plan_of(3, 6, 0, 1))?;
            let mine = (world.rank() + 1) as f32;
            let loss = net.matrix.val().sum().mul_scalar(mine)
                + net.bias.val().sum().mul_scalar(10.0 * mine);
            sum.accumulate(&net, &mut loss.backward());
            sum.reduce_by(&world, bucket)?;
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
            let mut sum = GradientAccumulator::new(&net, &plan_of(5, 6, rank, 2))?;
            sum.accumulate(&net, &mut net.matrix.val().sum().backward());
            sum.reduce(&groups.dp_cp)?;
            Ok::<_, OptimError>(values(sum.get("matrix").unwrap()))
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(results[0], [1.0; 24]);
        assert_eq!(results[1], [[1.0; 6], [0.0; 6], [0.0; 6], [0.0; 6]].concat());
    }
}
