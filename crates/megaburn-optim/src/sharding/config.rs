use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use burn::module::Module;
use megaburn_collective::ProcessGroups;

use super::{
    Inner, ParamKind, Replicas, Sharding, ShardingLevel,
    order::{Order, Params},
    param_all_gather::ParamAllGather,
    zero3_params::Zero3Params,
};
use crate::OptimError;

/// [`Sharding`] configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardingConfig {
    /// What is sharded.
    pub level: ShardingLevel,
    /// Ranks that shard it, neighbours in the data- and context-parallel group. Each group of that
    /// size holds a copy of the others' shards. It replaces Megatron's
    /// `--num-distributed-optimizer-instances`, which gives the number of copies instead. Default:
    /// all ranks.
    pub ranks: Option<usize>,
    /// Elements per collective. Default as in Megatron: the larger of 40 Mi (`40 << 20`) and one Mi
    /// per rank.
    pub bucket: Option<usize>,
    /// Matrices whose layers accumulate the gradients during backward
    /// ([`GradientAccumulator::with_main_grads`](crate::GradientAccumulator::with_main_grads)).
    /// They are sent first, in their own buckets. Default: none.
    pub direct: BTreeSet<String>,
    /// Parameters that two pipeline stages use, so that ranks outside the data- and
    /// context-parallel group may hold copies too. Each has its own bucket, so that ranks with the
    /// same shard of it hold the same part, and is sent after all backward passes, because several
    /// produce its gradients. Default: none.
    pub cross_stage: BTreeSet<String>,
    /// The rank's pipeline stage (chunk) of each parameter; parameters without an entry belong to
    /// the first. Buckets do not span stages, because backward completes each stage separately, the
    /// last one first. Default: none.
    pub chunks: BTreeMap<String, usize>,
    /// Parameters of experts ([`with_experts`](Self::with_experts)). Default: none.
    pub experts: BTreeSet<String>,
}

impl ShardingConfig {
    /// Shards over all ranks, in buckets of Megatron's size.
    pub fn new(level: ShardingLevel) -> Self {
        let (direct, cross_stage, chunks, experts) = Default::default();
        Self {
            level,
            ranks: None,
            bucket: None,
            direct,
            cross_stage,
            chunks,
            experts,
        }
    }

    /// Sets the number of ranks per sharding group.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Option<usize>) -> Self {
        self.ranks = ranks;
        self
    }

    /// Sets the number of elements per collective.
    #[must_use]
    pub fn with_bucket(mut self, bucket: Option<usize>) -> Self {
        self.bucket = bucket;
        self
    }

    /// Sets the parameters whose layers accumulate the gradients.
    #[must_use]
    pub fn with_direct(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.direct = paths.into_iter().collect();
        self
    }

    /// Sets the parameters that two pipeline stages use.
    #[must_use]
    pub fn with_cross_stage(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.cross_stage = paths.into_iter().collect();
        self
    }

    /// Sets the rank's pipeline stage of each parameter.
    #[must_use]
    pub fn with_chunks(mut self, chunks: impl IntoIterator<Item = (String, usize)>) -> Self {
        self.chunks = chunks.into_iter().collect();
        self
    }

    /// Sets the parameters of experts. Only the ranks of [`edp`](ProcessGroups::edp) hold copies of
    /// these: their gradients are summed over that group, and they are sharded within it over as
    /// many neighbours as divide it, at most [`ranks`](Self::ranks).
    ///
    /// All ranks of a stage must have the same number of experts, of the same shapes. Every expert
    /// gets a gradient in every backward pass of its stage and, where parameters are sharded, is
    /// read in every pass, even if no token was routed to it: it may have tokens on another rank
    /// that holds it.
    #[must_use]
    pub fn with_experts(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.experts = paths.into_iter().collect();
        self
    }

    /// Determines how the trainable parameters of `module` are sharded on this rank. A lazy
    /// parameter is not initialized, and counts as trainable and f32.
    ///
    /// # Errors
    /// `ranks` does not divide the number of data- and context-parallel ranks.
    /// # Collective
    /// Nothing is sent; all ranks must use the same configuration.
    pub fn init<M: Module>(
        &self,
        module: &M,
        groups: &ProcessGroups,
    ) -> Result<Sharding, OptimError> {
        let dense = Replicas::dense(groups, self.dense_ranks(groups.dp_cp.size())?)?;
        let experts = Replicas::experts(groups, self.expert_ranks(groups.edp.size()), &dense)?;
        let of_kinds = [dense, experts];
        let replicas = |kind: ParamKind| &of_kinds[kind as usize];
        let mut params = Params::of(self, module);
        let shapes = std::mem::take(&mut params.shapes);
        let mut buckets = Vec::new();
        let mut shared = Vec::new();
        for (order, bucket) in params.buckets(|kind| self.sizes(replicas(kind))) {
            let share = replicas(bucket.kind).share();
            let is_sharded = order != Order::Deferred && self.level == ShardingLevel::Parameters;
            if is_sharded && share.size() > 1 {
                shared.push((bucket.clone(), share.clone()));
            }
            buckets.push(bucket);
        }
        let shares = (!shared.is_empty()).then(|| Zero3Params::new(shared, &shapes));
        let mut kept = BTreeMap::new();
        for bucket in &buckets {
            let range = replicas(bucket.kind).shard_of(bucket);
            let slots = bucket.slots.iter();
            kept.extend(slots.map(|slot| (slot.path.clone(), slot.within(&range))));
        }
        Ok(Sharding(Arc::new(Inner {
            level: self.level,
            cross_stage: self.cross_stage.clone(),
            experts: self.experts.clone(),
            has_experts: buckets
                .iter()
                .any(|bucket| bucket.kind == ParamKind::Expert),
            counts_experts: groups.tp.rank() == 0 && replicas(ParamKind::Dense).share().rank() == 0,
            replicas: of_kinds,
            buckets,
            kept,
            gathering: ParamAllGather::default(),
            shares,
        })))
    }

    /// The number of ranks that shard dense parameters, of `replicas` ranks that hold copies.
    fn dense_ranks(&self, replicas: usize) -> Result<usize, OptimError> {
        let ranks = match self.level {
            ShardingLevel::None => 1,
            _ => self.ranks.unwrap_or(replicas),
        };
        if ranks > 0 && replicas.is_multiple_of(ranks) {
            Ok(ranks)
        } else {
            Err(OptimError::BadSharding { ranks, replicas })
        }
    }

    /// The number of ranks that shard experts, of `replicas` ranks that hold copies.
    fn expert_ranks(&self, replicas: usize) -> usize {
        let most = match self.level {
            ShardingLevel::None => 1,
            _ => self.ranks.unwrap_or(replicas),
        };
        let mut ranks = (1..=most).rev();
        ranks
            .find(|&ranks| replicas.is_multiple_of(ranks))
            .unwrap_or(1)
    }

    /// The approximate number of elements of a bucket, and the number of ranks that shard it.
    fn sizes(&self, replicas: &Replicas) -> [usize; 2] {
        let ranks = replicas.num_shares();
        let bucket = self
            .bucket
            .unwrap_or((40 << 20).max((ranks * replicas.copies().size()) << 20));
        [bucket, ranks]
    }
}
