use std::collections::VecDeque;

use burn::{Tensor, tensor::Float};
use megaburn_collective::{
    CollectiveError, ReduceOp,
    tensors::{self, Pending},
};

use super::Sharding;

/// Buckets on their way at a time: one that is sent, and one behind it.
const IN_FLIGHT: usize = 2;

/// Sums over ranks of buckets of gradients, a few on their way at a time, whose memory is taken: first over
/// those that share, and behind it over those that have the same share.
#[derive(Debug)]
pub(crate) struct Sums {
    sharding: Sharding,
    inner: VecDeque<Pending<1, Float>>,
    outer: VecDeque<Pending<1, Float>>,
    /// Of the first buckets.
    shares: Vec<Tensor<1>>,
}

impl Sums {
    pub(crate) fn new(sharding: Sharding) -> Self {
        let (inner, outer, shares) = Default::default();
        Self { sharding, inner, outer, shares }
    }

    /// Starts to sum this rank's gradients of the next bucket with the other ranks'.
    pub(crate) fn start(&mut self, whole: Tensor<1>) -> Result<(), CollectiveError> {
        let (share, copies) = (self.sharding.share(), self.sharding.copies());
        match share.size() {
            1 => {
                self.outer.push_back(tensors::start_all_reduce(whole, ReduceOp::Sum, copies)?);
            }
            _ => {
                let sum = tensors::start_reduce_scatter(whole, ReduceOp::Sum, share)?;
                self.inner.push_back(sum);
            }
        }
        self.advance(IN_FLIGHT)
    }

    /// This rank's shares of the sums of all that were started, in order.
    pub(crate) fn finish(&mut self) -> Result<Vec<Tensor<1>>, CollectiveError> {
        self.advance(0)?;
        Ok(std::mem::take(&mut self.shares))
    }

    /// Waits until no more than so many are on their way.
    fn advance(&mut self, most: usize) -> Result<(), CollectiveError> {
        while self.inner.len() > most {
            let Some(sum) = self.inner.pop_front().map(Pending::wait) else { break };
            match self.sharding.copies().size() {
                1 => self.shares.push(sum),
                _ => {
                    let copies = self.sharding.copies();
                    self.outer.push_back(tensors::start_all_reduce(sum, ReduceOp::Sum, copies)?);
                }
            }
        }
        while self.outer.len() > most {
            self.shares.extend(self.outer.pop_front().map(Pending::wait));
        }
        Ok(())
    }
}
