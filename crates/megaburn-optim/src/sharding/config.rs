use std::collections::{BTreeMap, BTreeSet};

use super::ShardingLevel;

/// [`Sharding`](super::Sharding) configuration.
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
    /// Parameters that several pipeline stages use, so that ranks outside the data- and
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

    /// Sets the parameters that several pipeline stages use.
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

    /// Sets the parameters of experts. Only the ranks of
    /// [`edp`](megaburn_collective::ProcessGroups::edp) hold copies of these: their gradients are
    /// summed over that group, and they are sharded within it over as many neighbours as divide it,
    /// at most [`ranks`](Self::ranks).
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
}
