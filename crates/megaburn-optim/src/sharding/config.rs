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
    /// What is shared out.
    pub level: ShardingLevel,
    /// Ranks that share it out, neighbours in the data- and context-parallel group; so many by so many
    /// hold copies of each other's shares (Megatron's `--num-distributed-optimizer-instances`, turned
    /// round). Default: all.
    pub ranks: Option<usize>,
    /// Elements that are sent at once. Default: as Megatron's, the larger of 40 million and a million a
    /// rank.
    pub bucket: Option<usize>,
    /// Matrices whose gradients their layers sum while backward goes on
    /// ([`GradientAccumulator::with_main_grads`](crate::GradientAccumulator::with_main_grads)): they are sent
    /// first, in buckets of their own. Default: none.
    pub direct: BTreeSet<String>,
    /// Parameters that two stages of a pipeline use, of which others than the data- and context-parallel ranks
    /// may have copies: each is in a bucket of its own, so that the ranks that hold one share of it hold the
    /// same, and is sent behind all backwards, of which several give it gradients. Default: none.
    pub cross_stage: BTreeSet<String>,
    /// Which of the rank's stages of a pipeline a parameter is of; one that is not named is of the first.
    /// A bucket ends where they do, as backward completes each by itself, the last one first. Default: none.
    pub chunks: BTreeMap<String, usize>,
    /// Parameters of experts ([`with_experts`](Self::with_experts)). Default: none.
    pub experts: BTreeSet<String>,
}

impl ShardingConfig {
    /// By all ranks, in Megatron's buckets.
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

    /// These parameters are kept apart.
    #[must_use]
    pub fn with_cross_stage(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.cross_stage = paths.into_iter().collect();
        self
    }

    /// These parameters are of these stages of the rank.
    #[must_use]
    pub fn with_chunks(mut self, chunks: impl IntoIterator<Item = (String, usize)>) -> Self {
        self.chunks = chunks.into_iter().collect();
        self
    }

    /// These parameters are of experts, which [`edp`](ProcessGroups::edp) holds copies of, and no other
    /// ranks: their gradients are summed over it, and shared out over it between as many neighbours as divide
    /// it, [`ranks`](Self::ranks) at most.
    ///
    /// All ranks of a stage have as many experts, of the same shapes. Each gets a gradient in every backward
    /// of its stage, and, where parameters are shared out, is read in every pass: one that no token came to
    /// too, as it may have some on another rank that holds it.
    #[must_use]
    pub fn with_experts(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.experts = paths.into_iter().collect();
        self
    }

    /// How the trainable parameters of `module` are shared out on this rank. One that was not drawn yet
    /// stays so, and counts as trainable and f32.
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
            let stretch = replicas(bucket.kind).shard_of(bucket);
            let slots = bucket.slots.iter();
            kept.extend(slots.map(|slot| (slot.path.clone(), slot.within(&stretch))));
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

    /// How many ranks share out dense parameters, of so many that hold copies.
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

    /// How many share out experts.
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

    /// About how many elements a bucket has, and how many ranks share it.
    fn sizes(&self, replicas: &Replicas) -> [usize; 2] {
        let ranks = replicas.num_shares();
        let bucket = self
            .bucket
            .unwrap_or((40 << 20).max((ranks * replicas.copies().size()) << 20));
        [bucket, ranks]
    }
}
