//! Determines which rank holds which parameters.

use std::{collections::BTreeMap, sync::Arc};

use burn::module::Module;
use megaburn_collective::ProcessGroups;

use super::{
    Inner, Sharding, ShardingLevel, config::ShardingConfig, fp8_params::Fp8Params, order::Params,
    overlapped_param_all_gather::ParamAllGather, param_kind::ParamKind, replicas::Replicas,
    zero3_params::Zero3Params,
};
use crate::error::OptimError;

impl ShardingConfig {
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
            let is_sharded = order.is_direct() && self.level == ShardingLevel::Parameters;
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
            fp8: Fp8Params::default(),
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
