//! What data-parallel ranks share out between them (ZeRO).

mod bucket;
mod gathering;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

pub(crate) use bucket::{Bucket, Slot, joined};
use burn::{
    Tensor,
    module::{Module, Param},
    tensor::Float,
};
use megaburn_collective::{
    CollectiveError, Group, ProcessGroups, ReduceOp,
    tensors::{self, Pending},
};

use gathering::Gathering;
use megaburn_kernels::MainGrad;

use crate::{
    OptimError,
    visit::{FloatVisitor, visit_floats},
};

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

/// [`Sharding`] configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardingConfig {
    /// What is shared out.
    pub level: ShardingLevel,
    /// Ranks that share it out, neighbours in the data- and context-parallel group; so many by so many
    /// hold copies of each other's shares (Megatron's `--num-distributed-optimizer-instances`, turned
    /// round). Default: all.
    pub ranks: Option<usize>,
    /// Elements that are sent at once. Default: as Megatron's, the larger of 40 million and a million a
    /// rank.
    pub bucket: Option<usize>,
    /// Parameters whose gradients their layers sum while backward goes on
    /// ([`GradientAccumulator::with_main_grads`](crate::GradientAccumulator::with_main_grads)): they are sent
    /// first, in buckets of their own. Default: none.
    pub direct: BTreeSet<String>,
}

impl ShardingConfig {
    /// By all ranks, in Megatron's buckets.
    pub fn new(level: ShardingLevel) -> Self {
        Self { level, ranks: None, bucket: None, direct: BTreeSet::new() }
    }

    /// Shared out between so many ranks each.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Option<usize>) -> Self {
        self.ranks = ranks;
        self
    }

    /// So many elements are sent at once.
    #[must_use]
    pub fn with_bucket(mut self, bucket: Option<usize>) -> Self {
        self.bucket = bucket;
        self
    }

    /// Of these parameters layers sum the gradients.
    #[must_use]
    pub fn with_direct(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.direct = paths.into_iter().collect();
        self
    }

    /// How the trainable parameters of `module` are shared out on this rank.
    ///
    /// # Errors
    /// `ranks` does not divide the data- and context-parallel ranks.
    /// # Collective
    /// Nothing is sent; all ranks must use the same configuration.
    pub fn init<M: Module>(
        &self,
        module: &M,
        groups: &ProcessGroups,
    ) -> Result<Sharding, OptimError> {
        let replicas = groups.dp_cp.size();
        let ranks = match self.level {
            ShardingLevel::None => 1,
            _ => self.ranks.unwrap_or(replicas),
        };
        if ranks == 0 || !replicas.is_multiple_of(ranks) {
            return Err(OptimError::BadSharding { ranks, replicas });
        }
        let Replicas { share, copies, norm } = Replicas::of(groups, ranks)?;
        let bucket = self.bucket.unwrap_or_else(|| (40 << 20).max(replicas << 20));
        let mut params = Params { direct: &self.direct, found: BTreeMap::new() };
        visit_floats(module, &mut params);
        let mut buckets = Vec::new();
        for mut params in params.found.into_values() {
            // Backward gives the gradients of the last parameters first.
            params.reverse();
            buckets.extend(Bucket::fill(params, bucket, ranks));
        }
        let mut kept = BTreeMap::new();
        for bucket in &buckets {
            let stretch = bucket.share(share.rank(), ranks);
            let slots = bucket.slots.iter();
            kept.extend(slots.map(|slot| (slot.path.clone(), slot.within(&stretch))));
        }
        Ok(Sharding(Arc::new(Inner {
            level: self.level,
            share,
            copies,
            norm,
            buckets,
            kept,
            gathering: Gathering::default(),
        })))
    }
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
        // (A view would keep all of them.)
        values.narrow(0, kept.start, kept.len()).mul_scalar(1.0)
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

/// The groups of a sharding.
struct Replicas {
    share: Group,
    copies: Group,
    norm: Group,
}

impl Replicas {
    fn of(groups: &ProcessGroups, ranks: usize) -> Result<Self, CollectiveError> {
        let ProcessGroups { world, dp_cp, model, .. } = groups;
        let alone = || world.subgroup("alone", &[world.rank()]);
        // One group, one communicator on the GPU: those that are there are used.
        if ranks == 1 {
            return Ok(Self { share: alone()?, copies: dp_cp.clone(), norm: model.clone() });
        }
        let members = dp_cp.members();
        let first = dp_cp.rank() / ranks * ranks;
        let (share, copies) = match members.len() == ranks {
            true => (dp_cp.clone(), alone()?),
            false => {
                let mine = members.iter().skip(dp_cp.rank() % ranks).step_by(ranks);
                let copies: Vec<usize> = mine.copied().collect();
                let share = world.subgroup("share", &members[first..first + ranks])?;
                (share, world.subgroup("copies", &copies)?)
            }
        };
        // Every tensor- and pipeline-parallel rank at the coordinates of each that shares.
        let mut all: Vec<usize> = share
            .members()
            .iter()
            .flat_map(|&rank| groups.mesh.group_of(&Replicas::MODEL, rank))
            .collect();
        all.sort_unstable();
        let norm = match all.len() == world.size() {
            true => world.clone(),
            false => world.subgroup("norm", &all)?,
        };
        Ok(Self { share, copies, norm })
    }

    /// The axes that split a model.
    const MODEL: [megaburn_mesh::Axis; 2] = [megaburn_mesh::Axis::Tp, megaburn_mesh::Axis::Pp];
}

/// The trainable parameters, in the module's order: path and elements. First those whose gradients come
/// while backward goes on; each by type.
struct Params<'a> {
    direct: &'a BTreeSet<String>,
    found: BTreeMap<(bool, &'static str), Vec<(String, usize)>>,
}

impl FloatVisitor for Params<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let value = param.val();
        if value.is_require_grad() {
            let key = (!self.direct.contains(&path), value.dtype().name());
            self.found.entry(key).or_default().push((path, value.shape().num_elements()));
        }
    }
}
