//! What data-parallel ranks share out between them (ZeRO).

mod bucket;
mod config;
mod gathering;

use std::{collections::BTreeMap, ops::Range, sync::Arc};

pub(crate) use bucket::{Bucket, Slot, joined};
use burn::{Tensor, tensor::Float};
pub use config::ShardingConfig;
use gathering::Gathering;
use megaburn_collective::{
    CollectiveError, Group, ReduceOp,
    tensors::{self, Pending},
};
use megaburn_kernels::MainGrad;

/// What each data-parallel rank keeps only a share of.
///
/// Source: Rajbhandari et al. 2020, <https://arxiv.org/abs/1910.02054>; Megatron-LM
/// `--use-distributed-optimizer` and `--data-parallel-sharding-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShardingLevel {
    /// Nothing: gradients are summed over all, and every rank updates every parameter.
    #[default]
    None,
    /// The optimizer's state and the masters (ZeRO-1): a rank gets the sums of its share of the
    /// gradients, updates its share of the parameters, and gathers the others'.
    Optimizer,
    /// The gradients as well (ZeRO-2): they are summed over ranks after each micro-batch, and a rank
    /// adds up its share only.
    Gradients,
}

/// How data-parallel ranks share out optimizer state, gradients and parameters; built once, and given to
/// what holds any of them. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Sharding(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    level: ShardingLevel,
    /// Between its members everything is shared out.
    share: Group,
    /// Its members have the same share.
    copies: Group,
    /// Its members hold one whole model between them, each element once.
    norm: Group,
    buckets: Vec<Bucket>,
    /// What of each trainable parameter this rank keeps.
    kept: BTreeMap<String, Range<usize>>,
    gathering: Gathering,
}

impl Sharding {
    /// Of one rank, which keeps everything of whatever it is given.
    pub fn none() -> Self {
        let alone = || Group::single(0);
        let (share, copies, norm) = (alone(), alone(), alone());
        let (buckets, kept, gathering) = Default::default();
        let level = ShardingLevel::None;
        Self(Arc::new(Inner { level, share, copies, norm, buckets, kept, gathering }))
    }

    /// What is shared out.
    pub fn level(&self) -> ShardingLevel {
        self.0.level
    }

    /// How many ranks share it out.
    pub fn num_shares(&self) -> usize {
        self.0.share.size()
    }

    /// Lets the layers of `weights` wait for what is gathered after an update, each before it first uses
    /// its weight, so that others compute meanwhile. From then on a parameter must not be read behind an
    /// update but by its layer, unless [`settle`](Self::settle) was called.
    pub fn wait_in_layers(&self, weights: &BTreeMap<String, MainGrad>) {
        self.0.gathering.wait_in_layers(&self.0.buckets, weights);
    }

    /// Waits for all parameters; on GPUs the host does not.
    pub fn settle(&self) {
        self.0.gathering.settle();
    }

    /// What is gathered of a bucket: to be read behind its layers' waiting.
    pub(crate) fn gathered(&self, bucket: &Bucket, started: Pending<1, Float>) -> Tensor<1> {
        self.0.gathering.of(bucket, started)
    }

    /// The members have a share each.
    pub(crate) fn share(&self) -> &Group {
        &self.0.share
    }

    /// The members have the same share.
    fn copies(&self) -> &Group {
        &self.0.copies
    }

    /// The members hold each element of the model once, where copies that tensor-parallel ranks have
    /// are not counted.
    pub(crate) fn norm(&self) -> &Group {
        &self.0.norm
    }

    /// In the order in which backward completes them.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.0.buckets
    }

    /// What of the local parameter at `path`, of `len` elements, this rank keeps.
    pub(crate) fn kept(&self, path: &str, len: usize) -> Range<usize> {
        self.0.kept.get(path).cloned().unwrap_or(0..len)
    }

    /// What this rank keeps of the values of the local parameter at `path`, a copy where it is not all.
    pub(crate) fn cut(&self, path: &str, values: Tensor<1>) -> Tensor<1> {
        let len = values.shape().num_elements();
        let kept = self.kept(path, len);
        if kept.len() == len {
            return values;
        }
        if kept.is_empty() {
            return Tensor::empty([0], (&values.device(), values.dtype()));
        }
        // A view would keep all of them, and so would what is computed in its place: it is computed
        // elsewhere while somebody else holds them.
        let part = values.clone().narrow(0, kept.start, kept.len()).mul_scalar(1.0);
        drop(values);
        part
    }

    /// Whether other ranks hold the same parameters.
    pub(crate) fn is_alone(&self) -> bool {
        self.0.share.size() == 1 && self.0.copies.size() == 1
    }

    /// Starts to sum the ranks' gradients of a bucket.
    pub(crate) fn start_sum(&self, whole: Tensor<1>) -> Result<Pending<1, Float>, CollectiveError> {
        match self.num_shares() {
            1 => tensors::start_all_reduce(whole, ReduceOp::Sum, self.copies()),
            _ => tensors::start_reduce_scatter(whole, ReduceOp::Sum, self.share()),
        }
    }

    /// This rank's share of the sum.
    pub(crate) fn finish_sum(
        &self,
        started: Pending<1, Float>,
    ) -> Result<Tensor<1>, CollectiveError> {
        match self.num_shares() {
            1 => Ok(started.wait()),
            _ => tensors::all_reduce(started.wait(), ReduceOp::Sum, self.copies()),
        }
    }

    /// What this rank keeps of a bucket.
    pub(crate) fn share_of(&self, bucket: &Bucket) -> Range<usize> {
        bucket.share(self.0.share.rank(), self.0.share.size())
    }
}
