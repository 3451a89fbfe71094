use std::collections::{BTreeMap, VecDeque};

use burn::Tensor;
use megaburn_collective::{
    CollectiveError, Lane, ReduceOp,
    tensors::{self, Work},
};

use super::{ParamKind, Sharding};

/// Buckets in flight at a time: one that is being sent, and one queued after it.
const IN_FLIGHT: usize = 2;

/// Reduces buckets of gradients over ranks: a reduce-scatter over the ranks that shard, then an
/// all-reduce over the ranks with the same shard. Only a few buckets are in flight at a time,
/// because each keeps its memory allocated.
#[derive(Debug)]
pub(crate) struct GradReduceQueue {
    sharding: Sharding,
    /// Reduce-scatters in flight, oldest first, each with its number and kind.
    inner: VecDeque<(usize, ParamKind, Work<Tensor<1>>)>,
    outer: VecDeque<(usize, Work<Tensor<1>>)>,
    /// Finished shards by number; buckets of different kinds may finish out of order.
    shares: BTreeMap<usize, Tensor<1>>,
    num_started: usize,
}

impl GradReduceQueue {
    pub(crate) fn new(sharding: Sharding) -> Self {
        let (inner, outer, shares, num_started) = Default::default();
        Self {
            sharding,
            inner,
            outer,
            shares,
            num_started,
        }
    }

    /// Starts to reduce this rank's gradients of the next bucket, which is of this kind.
    pub(crate) fn start(
        &mut self,
        kind: ParamKind,
        whole: Tensor<1>,
    ) -> Result<(), CollectiveError> {
        let replicas = self.sharding.replicas(kind);
        let number = self.num_started;
        self.num_started += 1;
        match replicas.num_shares() {
            1 => {
                let sum =
                    tensors::all_reduce(whole, ReduceOp::Sum, replicas.copies(), Lane::Overlapped)?;
                self.outer.push_back((number, sum));
            }
            _ => {
                let sum = tensors::reduce_scatter(
                    whole,
                    ReduceOp::Sum,
                    replicas.share(),
                    Lane::Overlapped,
                )?;
                self.inner.push_back((number, kind, sum));
            }
        }
        self.advance(IN_FLIGHT)
    }

    /// This rank's shards of all sums that were started, in order.
    pub(crate) fn finish(&mut self) -> Result<Vec<Tensor<1>>, CollectiveError> {
        self.advance(0)?;
        self.num_started = 0;
        Ok(std::mem::take(&mut self.shares).into_values().collect())
    }

    /// Waits until at most `most` reduce-scatters and `most` all-reduces are in flight.
    fn advance(&mut self, most: usize) -> Result<(), CollectiveError> {
        while self.inner.len() > most {
            let Some((number, kind, sum)) = self.inner.pop_front() else {
                break;
            };
            let sum = sum.wait();
            let copies = self.sharding.replicas(kind).copies();
            if copies.size() == 1 {
                self.shares.insert(number, sum);
            } else {
                let sum = tensors::all_reduce(sum, ReduceOp::Sum, copies, Lane::Overlapped)?;
                self.outer.push_back((number, sum));
            }
        }
        while self.outer.len() > most {
            let Some((number, sum)) = self.outer.pop_front() else {
                break;
            };
            self.shares.insert(number, sum.wait());
        }
        Ok(())
    }
}
