//! What data-parallel ranks share out between them (ZeRO).

mod bucket;
mod config;
mod grad_reduce_queue;
mod order;
mod param_all_gather;
mod replicas;
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
use burn::{Tensor, module::Module, tensor::Float};
pub use config::ShardingConfig;
pub(crate) use grad_reduce_queue::GradReduceQueue;
use megaburn_collective::{CollectiveError, tensors::AsyncCollective};
use megaburn_kernels::MainGrad;
use param_all_gather::ParamAllGather;
pub(crate) use replicas::{ParamKind, Replicas};
use zero3_params::Zero3Params;

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
    /// Parameters too (ZeRO-3), those matrices whose gradients their layers sum: they are gathered when
    /// they are read, forward and backward. Norms and biases every rank has. Before anything is computed
    /// [`Optimizer::cast_params`](crate::Optimizer::cast_params) must have taken them, in f32 too, and
    /// [`Sharding::attach`] told their layers.
    Parameters,
}

/// How data-parallel ranks share out optimizer state, gradients and parameters; built once, and given to
/// what holds any of them. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Sharding(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    level: ShardingLevel,
    cross_stage: BTreeSet<String>,
    experts: BTreeSet<String>,
    /// Whether this rank's stage has any.
    has_experts: bool,
    /// Whether this rank counts them for its stage, among those that hold each dense element once.
    counts_experts: bool,
    /// By kind.
    replicas: [Replicas; 2],
    buckets: Vec<Bucket>,
    /// What of each trainable parameter this rank keeps.
    kept: BTreeMap<String, Range<usize>>,
    gathering: ParamAllGather,
    /// Parameters that are shared out.
    shares: Option<Zero3Params>,
}

impl Sharding {
    /// Of one rank, which keeps everything of whatever it is given.
    pub fn none() -> Self {
        let (cross_stage, experts, has_experts, counts_experts) = Default::default();
        let replicas = [Replicas::none(), Replicas::none()];
        let (buckets, kept, gathering, shares) = Default::default();
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
            shares,
        }))
    }

    /// What is shared out.
    pub fn level(&self) -> ShardingLevel {
        self.0.level
    }

    /// Whether a parameter has a bucket of its own, because other stages of a pipeline have copies of it.
    pub(crate) fn is_cross_stage(&self, path: &str) -> bool {
        self.0.cross_stage.contains(path)
    }

    /// How many ranks share out the parameter at `path`, or what is kept of it.
    pub fn num_shares(&self, path: &str) -> usize {
        self.replicas_of(path).num_shares()
    }

    /// Whether any parameters of this rank are shared out, or what is kept of them.
    pub(crate) fn is_sharded(&self) -> bool {
        self.any_kind(|replicas| replicas.num_shares() > 1)
    }

    /// Whether no other rank holds any parameter of this one.
    pub(crate) fn is_alone(&self) -> bool {
        !self.any_kind(|replicas| !replicas.is_alone())
    }

    fn any_kind(&self, mut is: impl FnMut(&Replicas) -> bool) -> bool {
        let mut kinds = ParamKind::ALL.into_iter().filter(|&kind| self.has(kind));
        kinds.any(|kind| is(self.replicas(kind)))
    }

    /// Whether this rank's stage may have parameters of a kind.
    pub(crate) fn has(&self, kind: ParamKind) -> bool {
        kind == ParamKind::Dense || self.0.has_experts
    }

    /// Whether what is counted of the experts of a stage is this rank's to add to what is counted of dense
    /// parameters: one rank's for each stage.
    pub(crate) fn counts_experts(&self) -> bool {
        self.0.counts_experts
    }

    /// Who holds copies of the parameter at `path`.
    pub(crate) fn kind_of(&self, path: &str) -> ParamKind {
        ParamKind::of(&self.0.experts, path)
    }

    /// The ranks that hold copies of parameters of a kind.
    pub(crate) fn replicas(&self, kind: ParamKind) -> &Replicas {
        &self.0.replicas[kind as usize]
    }

    /// The ranks that hold copies of the parameter at `path`.
    pub(crate) fn replicas_of(&self, path: &str) -> &Replicas {
        self.replicas(self.kind_of(path))
    }

    /// Lets the layers of `weights` have parameters where they are: wait for what is gathered after an
    /// update, each before it first uses its weight, and gather what is [shared
    /// out](ShardingLevel::Parameters) when they read it. If this `overlaps`, others compute meanwhile.
    ///
    /// From then on a parameter must not be read behind an update but by its layer, unless
    /// [`settle`](Self::settle) was called; one that is shared out never.
    pub fn attach(&self, weights: &BTreeMap<String, MainGrad>, overlaps: bool) {
        match &self.0.shares {
            Some(shares) => shares.attach(weights, overlaps),
            None if overlaps => self.0.gathering.wait_on_use(&self.0.buckets, weights),
            None => {}
        }
    }

    /// Waits for all parameters; on GPUs the host does not. What is shared out stays so.
    pub fn settle(&self) {
        self.0.gathering.settle();
    }

    /// Lets go of parameters that are shared out and were gathered, or are on their way. What is read next
    /// is the beginning of a pass: call it behind one that had no backward.
    ///
    /// # Collective
    /// All ranks that share parameters, at the same place among the passes; nothing is sent.
    pub fn release(&self) {
        if let Some(shares) = &self.0.shares {
            shares.release();
        }
    }

    /// Says what failed while layers gathered their weights, which are NaN then.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.0.shares.as_ref().map_or(Ok(()), Zero3Params::check)
    }

    /// Whether this rank keeps only its share of the parameter at `path`: in the module it has no values,
    /// and a layer that reads it needs all ranks that share it to do so too.
    pub fn is_param_sharded(&self, path: &str) -> bool {
        self.0
            .shares
            .as_ref()
            .is_some_and(|shares| shares.has(path))
    }

    /// The module with all values, also of parameters that are shared out, to be read: its layers go on to
    /// gather theirs.
    ///
    /// # Errors
    /// See [`CollectiveError`]; the module is lost then.
    /// # Collective
    /// All ranks that share parameters.
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

    /// Takes what this rank keeps of a parameter that is shared out.
    pub(crate) fn give(&self, path: &str, part: Tensor<1>) {
        if let Some(shares) = &self.0.shares {
            shares.give(path, part);
        }
    }

    /// What this rank keeps of a parameter that is shared out.
    pub(crate) fn part(&self, path: &str) -> Option<Tensor<1>> {
        self.0.shares.as_ref()?.part(path)
    }

    /// Takes what this rank keeps of a bucket of parameters that are shared out, for
    /// [`put_share`](Self::put_share) to replace.
    pub(crate) fn take_share(&self, bucket: &Bucket) -> Option<Tensor<1>> {
        self.0.shares.as_ref()?.take(&bucket.slots[0].path)
    }

    pub(crate) fn put_share(&self, bucket: &Bucket, share: Tensor<1>) {
        if let Some(shares) = &self.0.shares {
            shares.put(&bucket.slots[0].path, share);
        }
    }

    /// That all shares are new.
    pub(crate) fn updated(&self) {
        if let Some(shares) = &self.0.shares {
            shares.updated();
        }
    }

    /// What is gathered of a bucket: to be read behind its layers' waiting.
    pub(crate) fn gathered(
        &self,
        bucket: &Bucket,
        started: AsyncCollective<1, Float>,
    ) -> Tensor<1> {
        self.0.gathering.of(bucket, started)
    }

    /// In the order in which backward completes them.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.0.buckets
    }

    /// The parameters that this rank updates something of, in that order, with the elements that it keeps;
    /// out of all, by path and local elements.
    pub(crate) fn update_order(&self, lens: BTreeMap<String, usize>) -> Vec<(String, usize)> {
        if !self.is_sharded() {
            return lens.into_iter().collect();
        }
        // What backward completes last, forward needs first.
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
        let part = values
            .clone()
            .narrow(0, kept.start, kept.len())
            .mul_scalar(1.0);
        drop(values);
        part
    }

    /// What this rank keeps of a bucket.
    pub(crate) fn shard_of(&self, bucket: &Bucket) -> Range<usize> {
        self.replicas(bucket.kind).shard_of(bucket)
    }
}
