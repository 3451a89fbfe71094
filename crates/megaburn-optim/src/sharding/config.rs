use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::DType,
};
use megaburn_collective::{CollectiveError, Group, ProcessGroups};
use megaburn_mesh::Axis;

use super::{Bucket, Inner, Sharding, ShardingLevel, gathering::Gathering, shares::Shares};
use crate::{
    OptimError,
    visit::{FloatVisitor, visit_floats},
};

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
    pub apart: BTreeSet<String>,
    /// Which of the rank's stages of a pipeline a parameter is of; one that is not named is of the first.
    /// A bucket ends where they do, as backward completes each by itself, the last one first. Default: none.
    pub chunks: BTreeMap<String, usize>,
}

impl ShardingConfig {
    /// By all ranks, in Megatron's buckets.
    pub fn new(level: ShardingLevel) -> Self {
        let (direct, apart, chunks) = Default::default();
        Self { level, ranks: None, bucket: None, direct, apart, chunks }
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
    pub fn with_apart(mut self, paths: impl IntoIterator<Item = String>) -> Self {
        self.apart = paths.into_iter().collect();
        self
    }

    /// These parameters are of these stages of the rank.
    #[must_use]
    pub fn with_chunks(mut self, chunks: impl IntoIterator<Item = (String, usize)>) -> Self {
        self.chunks = chunks.into_iter().collect();
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
        let (found, shapes) = Default::default();
        let mut params = Params { config: self, found, shapes };
        visit_floats(module, &mut params);
        let (mut buckets, mut shared) = (Vec::new(), Vec::new());
        for ((order, Reverse(chunk), _), mut found) in params.found {
            // Backward gives the gradients of the last parameters first.
            found.reverse();
            let filled = match order {
                Order::Apart => {
                    found.into_iter().flat_map(|of| Bucket::fill(chunk, [of], 0, ranks)).collect()
                }
                _ => Bucket::fill(chunk, found, bucket, ranks),
            };
            if order != Order::Late && self.level == ShardingLevel::Parameters {
                shared.extend(filled.iter().cloned());
            }
            buckets.extend(filled);
        }
        let shares = match ranks {
            1 => None,
            _ if shared.is_empty() => None,
            _ => Some(Shares::new(share.clone(), shared, &params.shapes)),
        };
        let mut kept = BTreeMap::new();
        for bucket in &buckets {
            let stretch = bucket.share(share.rank(), ranks);
            let slots = bucket.slots.iter();
            kept.extend(slots.map(|slot| (slot.path.clone(), slot.within(&stretch))));
        }
        Ok(Sharding(Arc::new(Inner {
            level: self.level,
            apart: self.apart.clone(),
            share,
            copies,
            norm,
            buckets,
            kept,
            gathering: Gathering::default(),
            shares,
        })))
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
    const MODEL: [Axis; 2] = [Axis::Tp, Axis::Pp];
}

/// When gradients are sent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    /// While backward goes on.
    Direct,
    /// Behind it; of matrices that stages share.
    Apart,
    Late,
}

/// What parameters of a bucket have in common: when they are sent, the chunk, of which the last comes first,
/// and the type.
type Kind = (Order, Reverse<usize>, &'static str);

/// The trainable parameters, in the module's order: path and elements.
struct Params<'a> {
    config: &'a ShardingConfig,
    found: BTreeMap<Kind, Vec<(String, usize)>>,
    /// Of matrices.
    shapes: BTreeMap<String, [usize; 2]>,
}

impl FloatVisitor for Params<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let dtype = match param.is_initialized() {
            false => DType::F32,
            true => {
                let value = param.val();
                if !value.is_require_grad() {
                    return;
                }
                value.dtype()
            }
        };
        let shape = param.lazy_shape();
        let matrix = <[usize; 2]>::try_from(shape.to_vec()).ok();
        let is_direct = matrix.is_some() && self.config.direct.contains(&path);
        let order = match is_direct {
            true if self.config.apart.contains(&path) => Order::Apart,
            true => Order::Direct,
            false => Order::Late,
        };
        self.shapes.extend(matrix.map(|shape| (path.clone(), shape)));
        let chunk = self.config.chunks.get(&path).copied().unwrap_or_default();
        let found = self.found.entry((order, Reverse(chunk), dtype.name())).or_default();
        found.push((path, shape.num_elements()));
    }
}
