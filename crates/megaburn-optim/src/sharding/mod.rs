//! Shards optimizer state, gradients and parameters over data-parallel ranks (ZeRO).

mod bucket;
mod config;
mod fp8;
mod fp8_message;
mod fp8_params;
mod grad_reduce_queue;
mod init;
mod order;
mod overlapped_param_all_gather;
mod param_kind;
mod replicas;
mod sent_bucket;
#[cfg(test)]
mod tests;
mod zero3_params;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use crate::leaf::put;
pub(crate) use bucket::{Bucket, Slot, joined};
use burn::{Tensor, module::Module};
pub use config::ShardingConfig;
use fp8_params::Fp8Params;
pub use fp8_params::{DelayedScale, Fp8Param};
pub(crate) use grad_reduce_queue::GradReduceQueue;
use megaburn_autograd::MainGrad;
use megaburn_collective::CollectiveError;
use overlapped_param_all_gather::ParamAllGather;
pub(crate) use param_kind::ParamKind;
pub(crate) use replicas::Replicas;
pub(crate) use sent_bucket::SentBucket;
use zero3_params::Zero3Params;

/// What is sharded over data-parallel ranks.
///
/// Source: Rajbhandari et al. 2020, <https://arxiv.org/abs/1910.02054>; Megatron-LM
/// `--use-distributed-optimizer` and `--data-parallel-sharding-strategy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShardingLevel {
    /// Nothing is sharded: gradients are all-reduced, and every rank updates every parameter.
    #[default]
    None,
    /// Optimizer state and masters are sharded (ZeRO-1): a rank gets the sums of its shard of the
    /// gradients, updates its shard of the parameters, and all-gathers the others.
    Optimizer,
    /// Gradients are sharded too (ZeRO-2): they are summed over ranks after each micro-batch, and a
    /// rank accumulates its shard only.
    Gradients,
    /// Parameters are sharded too (ZeRO-3), namely the matrices whose layers accumulate their
    /// gradients. They are all-gathered when they are read, in the forward and the backward pass.
    /// Every rank has norms and biases in full. Before the first forward pass,
    /// [`Optimizer::cast_params`](crate::Optimizer::cast_params) must have taken the parameters
    /// (even to keep them in f32), and [`Sharding::attach`] must have connected their layers.
    Parameters,
}

/// How optimizer state, gradients and parameters are sharded over data-parallel ranks. It is built
/// once and passed to everything that holds any of them. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Sharding(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    level: ShardingLevel,
    cross_stage: BTreeSet<String>,
    experts: BTreeSet<String>,
    /// Whether this rank's stage has any experts.
    has_experts: bool,
    /// Whether this rank adds its stage's experts to sums over the ranks that hold each dense
    /// element once.
    counts_experts: bool,
    /// Indexed by [`ParamKind`].
    replicas: [Replicas; 2],
    buckets: Vec<Bucket>,
    /// The range of each trainable parameter that this rank keeps.
    kept: BTreeMap<String, Range<usize>>,
    gathering: ParamAllGather,
    /// The weights that are sent in FP8.
    fp8: Fp8Params,
    /// Sharded parameters.
    shares: Option<Zero3Params>,
}

impl Sharding {
    /// No sharding: a single rank keeps all parameters in full.
    pub fn none() -> Self {
        let (cross_stage, experts, has_experts, counts_experts) = Default::default();
        let replicas = [Replicas::none(), Replicas::none()];
        let (buckets, kept, gathering, fp8, shares) = Default::default();
        let level = ShardingLevel::None;
        Self(Arc::new(Inner {
            level,
            cross_stage,
            experts,
            has_experts,
            counts_experts,
            replicas,
            buckets,
            kept,
            gathering,
            fp8,
            shares,
        }))
    }

    /// What is sharded.
    pub fn level(&self) -> ShardingLevel {
        self.0.level
    }

    /// Whether the parameter has a bucket of its own, because other pipeline stages have copies of
    /// it.
    pub(crate) fn is_cross_stage(&self, path: &str) -> bool {
        self.0.cross_stage.contains(path)
    }

    /// The number of ranks that shard the parameter at `path` or its state.
    pub fn num_shares(&self, path: &str) -> usize {
        self.replicas_of(path).num_shares()
    }

    /// Whether any parameters of this rank, or their state, are sharded.
    pub(crate) fn is_sharded(&self) -> bool {
        self.any_kind(|replicas| replicas.num_shares() > 1)
    }

    /// Whether no other rank holds any of this rank's parameters.
    pub(crate) fn is_alone(&self) -> bool {
        !self.any_kind(|replicas| !replicas.is_alone())
    }

    fn any_kind(&self, mut is: impl FnMut(&Replicas) -> bool) -> bool {
        let mut kinds = ParamKind::ALL.into_iter().filter(|&kind| self.has(kind));
        kinds.any(|kind| is(self.replicas(kind)))
    }

    /// Whether this rank's stage may have parameters of this kind.
    pub(crate) fn has(&self, kind: ParamKind) -> bool {
        kind == ParamKind::Dense || self.0.has_experts
    }

    /// Whether this rank adds the experts' count or sum of its stage to that of the dense
    /// parameters. One rank per stage does.
    pub(crate) fn counts_experts(&self) -> bool {
        self.0.counts_experts
    }

    /// The kind of the parameter at `path`, which says which ranks hold copies of it.
    pub(crate) fn kind_of(&self, path: &str) -> ParamKind {
        ParamKind::of(&self.0.experts, path)
    }

    /// The ranks that hold copies of parameters of this kind.
    pub(crate) fn replicas(&self, kind: ParamKind) -> &Replicas {
        &self.0.replicas[kind as usize]
    }

    /// The ranks that hold copies of the parameter at `path`.
    pub(crate) fn replicas_of(&self, path: &str) -> &Replicas {
        self.replicas(self.kind_of(path))
    }

    /// Connects the layers of `weights`: before its first use of a weight, a layer waits for the
    /// all-gather after the last update, and it all-gathers [sharded
    /// parameters](ShardingLevel::Parameters) when it reads them. With `overlaps`, that
    /// communication overlaps the computation of other layers.
    ///
    /// From then on, only its layer may read a parameter after an update, unless
    /// [`settle`](Self::settle) was called. A sharded parameter must never be read otherwise.
    pub fn attach(&self, weights: &BTreeMap<String, MainGrad>, overlaps: bool) {
        match &self.0.shares {
            Some(shares) => shares.attach(weights, overlaps),
            None if overlaps => self.0.gathering.wait_on_use(&self.0.buckets, weights),
            None => {}
        }
    }

    /// Waits for all parameters that are in flight; on GPUs the host does not wait. Sharded
    /// parameters stay sharded.
    pub fn settle(&self) {
        self.0.gathering.settle();
    }

    /// Releases sharded parameters that were gathered or are in flight. The next read is then taken
    /// as the start of a pass, so call this after a pass without a backward pass.
    ///
    /// # Collective
    /// All ranks that shard parameters, at the same point between passes; nothing is sent.
    pub fn release(&self) {
        if let Some(shares) = &self.0.shares {
            shares.release();
        }
    }

    /// Reports errors that occurred while layers gathered their weights. Those weights are NaN.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.0.shares.as_ref().map_or(Ok(()), Zero3Params::check)
    }

    /// Whether this rank keeps only its shard of the parameter at `path`. The module then has no
    /// values for it, and when a layer reads it, all ranks that shard it must do so too.
    pub fn is_param_sharded(&self, path: &str) -> bool {
        self.0
            .shares
            .as_ref()
            .is_some_and(|shares| shares.has(path))
    }

    /// Returns the module with all values filled in, those of sharded parameters too, to be read.
    /// Its layers still gather their own weights.
    ///
    /// # Errors
    /// See [`CollectiveError`]; the module is lost then.
    /// # Collective
    /// All ranks that shard parameters.
    pub fn whole<M: Module>(&self, module: M) -> Result<M, CollectiveError> {
        self.settle();
        self.release();
        match &self.0.shares {
            Some(shares) => {
                let mut values = shares.gather()?;
                Ok(put(module, |path| Some((None, values.remove(path)?))))
            }
            None => Ok(module),
        }
    }

    /// Stores the part of a sharded parameter that this rank keeps.
    pub(crate) fn give(&self, path: &str, part: Tensor<1>) {
        if let Some(shares) = &self.0.shares {
            shares.give(path, part);
        }
    }

    /// The part of a sharded parameter that this rank keeps.
    pub(crate) fn part(&self, path: &str) -> Option<Tensor<1>> {
        self.0.shares.as_ref()?.part(path)
    }

    /// The part of a [sharded](Self::is_param_sharded) parameter that this rank keeps, after the range
    /// of the flattened local parameter; `None` before it was stored.
    ///
    /// # Shapes
    /// `[range.len()]`
    pub fn kept_part(&self, path: &str) -> Option<(Range<usize>, Tensor<1>)> {
        let part = self.part(path)?;
        Some((self.0.kept.get(path)?.clone(), part))
    }

    /// Takes this rank's shard of a bucket of sharded parameters; [`put_share`](Self::put_share)
    /// replaces it.
    pub(crate) fn take_share(&self, bucket: &Bucket) -> Option<Tensor<1>> {
        self.0.shares.as_ref()?.take(&bucket.slots[0].path)
    }

    pub(crate) fn put_share(&self, bucket: &Bucket, share: Tensor<1>) {
        if let Some(shares) = &self.0.shares {
            shares.put(&bucket.slots[0].path, share, None);
        }
    }

    /// Marks all shards as updated.
    pub(crate) fn updated(&self) {
        if let Some(shares) = &self.0.shares {
            shares.updated();
        }
    }

    /// The values of a bucket that is being gathered; read them only after its layers have waited.
    pub(crate) fn gathered(&self, bucket: &Bucket, started: SentBucket) -> Tensor<1> {
        self.0.gathering.of(bucket, started)
    }

    /// The buckets, in the order in which backward completes them.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.0.buckets
    }

    /// The parameters of which this rank updates at least a part, in update order, with the number
    /// of elements that it keeps. `lens` has all parameters, by path and local elements.
    pub(crate) fn update_order(&self, lens: BTreeMap<String, usize>) -> Vec<(String, usize)> {
        if !self.is_sharded() {
            return lens.into_iter().collect();
        }
        // Reverse order, because forward first needs what backward completes last.
        let slots = self.buckets().iter().rev().flat_map(|bucket| {
            let share = self.shard_of(bucket);
            bucket
                .slots
                .iter()
                .map(move |slot| (&slot.path, slot.within(&share).len()))
        });
        let updated = slots.filter(|(path, len)| *len > 0 && lens.contains_key(*path));
        updated.map(|(path, len)| (path.clone(), len)).collect()
    }

    /// Whether the parameter at `path` is updated.
    pub(crate) fn is_trainable(&self, path: &str) -> bool {
        self.0.kept.contains_key(path)
    }

    /// The range that this rank keeps of the local parameter at `path`, which has `len` elements.
    pub(crate) fn kept(&self, path: &str, len: usize) -> Range<usize> {
        self.0.kept.get(path).cloned().unwrap_or(0..len)
    }

    /// The values that this rank keeps of the local parameter at `path`; a copy, unless it keeps
    /// all.
    pub(crate) fn cut(&self, path: &str, values: Tensor<1>) -> Tensor<1> {
        let len = values.shape().num_elements();
        let kept = self.kept(path, len);
        if kept.len() == len {
            return values;
        }
        if kept.is_empty() {
            return Tensor::empty([0], (&values.device(), values.dtype()));
        }
        // A view would keep the full tensor alive, and so would an in-place result. While `values`
        // is held here, `mul_scalar` cannot run in place and writes to new memory.
        let part = values
            .clone()
            .narrow(0, kept.start, kept.len())
            .mul_scalar(1.0);
        drop(values);
        part
    }

    /// The range of a bucket that this rank keeps.
    pub(crate) fn shard_of(&self, bucket: &Bucket) -> Range<usize> {
        self.replicas(bucket.kind).shard_of(bucket)
    }
}
