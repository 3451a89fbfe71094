//! Full parameters from the shards of a group's members, and back.

use std::{collections::BTreeMap, sync::Arc};

use burn::tensor::Tensor;
use megaburn_mesh::{Axis, ShardPlan, ShardSpec};
use thiserror::Error;

use crate::{
    error::CollectiveError,
    group::Group,
    lane::Lane,
    objects,
    tensors::{self, CollectiveElement},
};

/// Why the shards of a group do not make up full parameters.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum ShardsError {
    #[error(
        "`{path}` belongs to an expert, whose copies are on other ranks than those of group \
        {group}: `megaburn::checkpoint` saves and loads experts"
    )]
    Expert { path: String, group: String },
    #[error(
        "rank {rank} of group {group} has no parameter `{path}`, which rank 0 has: pass the group \
        that splits one module; `megaburn::checkpoint` saves and loads pipeline stages"
    )]
    Missing {
        path: String,
        group: String,
        rank: usize,
    },
    #[error(
        "the {ranks} ranks of group {group} hold {held} of the {len} elements of `{path}` along \
        dimension {dim}: pass the group that splits the module"
    )]
    Incomplete {
        path: String,
        group: String,
        ranks: usize,
        held: usize,
        len: usize,
        dim: usize,
    },
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// The shards of every parameter of a module, of all members of the group that splits it.
#[derive(Clone, Debug)]
pub struct GroupShards {
    params: BTreeMap<String, ParamShards>,
}

impl GroupShards {
    /// Exchanges the plans of all members.
    ///
    /// # Errors
    /// The members do not hold the same parameters, or do not hold all of one. An expert's
    /// parameter is refused.
    /// # Collective
    /// All members of `group`.
    pub fn new(plan: &ShardPlan, group: &Group) -> Result<Self, ShardsError> {
        let plans = objects::gather(group, plan)?;
        let plans = objects::broadcast(group, &plans)?;
        let name = || group.name().to_string();
        let mut params = BTreeMap::new();
        for (path, first) in plans[0].iter() {
            let path = path.to_string();
            if first.shard.axis != Axis::Tp {
                return Err(ShardsError::Expert {
                    path,
                    group: name(),
                });
            }
            let mut specs = Vec::new();
            for (rank, plan) in plans.iter().enumerate() {
                match plan.get(&path) {
                    Some(spec) => specs.push(spec.shard.clone()),
                    None => {
                        return Err(ShardsError::Missing {
                            path,
                            group: name(),
                            rank,
                        });
                    }
                }
            }
            check_complete(&path, &specs, group)?;
            let shards = ParamShards {
                specs: specs.into(),
                group: group.clone(),
            };
            params.insert(path, shards);
        }
        if let Some((path, _)) = plan.iter().find(|(path, _)| !params.contains_key(*path)) {
            return Err(ShardsError::Missing {
                path: path.to_string(),
                group: name(),
                rank: 0,
            });
        }
        Ok(Self { params })
    }

    /// The shards of the parameter at `path`.
    pub fn get(&self, path: &str) -> Option<&ParamShards> {
        self.params.get(path)
    }

    /// All parameters in path order, which is the same on every member.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ParamShards)> {
        self.params
            .iter()
            .map(|(path, shards)| (path.as_str(), shards))
    }
}

/// Refuses a parameter of which the members do not own every element once.
fn check_complete(path: &str, specs: &[ShardSpec], group: &Group) -> Result<(), ShardsError> {
    let first = &specs[0];
    let len = first.global_shape.get(first.dim).copied().unwrap_or(1);
    let owned = |spec: &ShardSpec| spec.owned().map(|piece| piece.global.len()).sum::<usize>();
    let held = specs.iter().map(owned).sum();
    if held == len {
        return Ok(());
    }
    Err(ShardsError::Incomplete {
        path: path.to_string(),
        group: group.name().to_string(),
        ranks: group.size(),
        held,
        len,
        dim: first.dim,
    })
}

/// The shards of one parameter, of all members of the group that splits it.
#[derive(Clone, Debug)]
pub struct ParamShards {
    specs: Arc<[ShardSpec]>,
    group: Group,
}

impl ParamShards {
    /// This rank's part.
    pub fn own(&self) -> &ShardSpec {
        &self.specs[self.group.rank()]
    }

    /// The group that splits the parameter.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Whether a member's tensor differs from the full one: it is split or padded.
    pub fn is_split(&self) -> bool {
        let differs = |spec: &ShardSpec| spec.local_shape() != spec.global_shape;
        self.specs.iter().any(differs)
    }

    /// The full tensor, on every member.
    ///
    /// # Shapes
    /// This rank's shape to the global one.
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members, if the parameter is split.
    pub fn gather<const D: usize, K: CollectiveElement>(
        &self,
        local: Tensor<D, K>,
    ) -> Result<Tensor<D, K>, CollectiveError> {
        if !self.is_split() {
            return Ok(local);
        }
        let all = tensors::all_gather(local, &self.group, Lane::InOrder)?.wait();
        Ok(self.joined(all))
    }

    /// The full tensor, on member 0 only.
    ///
    /// # Shapes
    /// This rank's shape to the global one.
    /// # Errors
    /// See [`CollectiveError`].
    /// # Collective
    /// All members, if the parameter is split; each sends its shard to member 0.
    pub fn gather_on_first<const D: usize, K: CollectiveElement>(
        &self,
        local: Tensor<D, K>,
    ) -> Result<Option<Tensor<D, K>>, CollectiveError> {
        let is_first = self.group.rank() == 0;
        if !self.is_split() {
            return Ok(is_first.then_some(local));
        }
        if self.group.size() == 1 {
            return Ok(Some(self.joined(local)));
        }
        let rows = local.dims()[0];
        let mut sent = vec![0; self.group.size()];
        sent[0] = rows;
        let received = vec![if is_first { rows } else { 0 }; self.group.size()];
        let all = tensors::all_to_all(local, &sent, &received, &self.group, Lane::InOrder)?.wait();
        Ok(is_first.then(|| self.joined(all)))
    }

    /// The members' tensors, one below the other, as the full tensor.
    fn joined<const D: usize, K: CollectiveElement>(&self, all: Tensor<D, K>) -> Tensor<D, K> {
        let mut parts = Vec::new();
        for (rank, spec) in self.specs.iter().enumerate() {
            let rows = spec.local_shape()[0];
            let of_rank = all.clone().narrow(0, rank * rows, rows);
            for piece in spec.owned() {
                let part = of_rank
                    .clone()
                    .narrow(spec.dim, piece.local.start, piece.local.len());
                parts.push((piece.global.start, part));
            }
        }
        parts.sort_by_key(|(start, _)| *start);
        let parts = parts.into_iter().map(|(_, part)| part).collect();
        Tensor::cat(parts, self.own().dim)
    }

    /// This rank's part of the full tensor, with zeros as padding.
    ///
    /// # Shapes
    /// The global shape to this rank's.
    pub fn part<const D: usize, K: CollectiveElement>(&self, full: Tensor<D, K>) -> Tensor<D, K> {
        shard_of(full, self.own())
    }
}

/// The part of a full tensor that a rank holds, with zeros as padding.
///
/// # Shapes
/// The global shape to the rank's.
pub fn shard_of<const D: usize, K: CollectiveElement>(
    full: Tensor<D, K>,
    spec: &ShardSpec,
) -> Tensor<D, K> {
    if spec.local_shape() == spec.global_shape {
        return full;
    }
    let mut parts = Vec::new();
    for piece in spec.pieces.iter().filter(|piece| !piece.global.is_empty()) {
        let range = &piece.global;
        parts.push(full.clone().narrow(spec.dim, range.start, range.len()));
    }
    let held: usize = spec.pieces.iter().map(|piece| piece.local.len()).sum();
    if held < spec.local_len {
        let mut shape = full.dims();
        shape[spec.dim] = spec.local_len - held;
        parts.push(Tensor::zeros(shape, (&full.device(), full.dtype())));
    }
    Tensor::cat(parts, spec.dim)
}

#[cfg(test)]
mod tests {
    use burn::{
        Tensor,
        prelude::{Device, Int},
    };
    use megaburn_mesh::{Axis, FusedPart, ParamSpec, ShardPlan, ShardSpec};

    use super::*;
    use crate::{GroupOptions, run_threads};

    fn plan_of(params: [(&str, ShardSpec); 3]) -> ShardPlan {
        let mut plan = ShardPlan::new();
        for (path, shard) in params {
            plan.insert(path, ParamSpec { shard }).unwrap();
        }
        plan
    }

    #[test]
    fn a_part_of_the_full_tensor_is_gathered_again() {
        for ranks in [1, 2, 4] {
            let found = run_threads(ranks, GroupOptions::default(), |group| {
                let [rank, size] = [group.rank(), group.size()];
                // Query heads, of which there are enough, and keys that ranks share.
                let parts = [FusedPart::units(4, 3), FusedPart::units(2, 3)];
                let qkv = ShardSpec::split(&[5, 18], 1, &parts, Axis::Tp, rank, size).unwrap();
                // 7 rows, padded to 8.
                let rows = ShardSpec::split_padded(&[7, 2], 0, 8, Axis::Tp, rank, size).unwrap();
                let norm = ShardSpec::whole(&[1, 6], Axis::Tp, rank, size);
                let plan = plan_of([("norm", norm), ("qkv", qkv), ("rows", rows)]);
                let shards = GroupShards::new(&plan, &group)?;
                let mut seen = Vec::new();
                for (path, param) in shards.iter() {
                    let [rows, columns] = param.own().global_shape[..] else {
                        panic!("{path} is no matrix");
                    };
                    let device = Device::flex();
                    let values = Tensor::<1, Int>::arange(0..(rows * columns) as i64, &device);
                    let full = values.reshape([rows, columns]);
                    let part = param.part(full.clone());
                    assert_eq!(part.dims().to_vec(), param.own().local_shape(), "{path}");
                    let gathered = param.gather(part.clone())?.into_data();
                    assert_eq!(gathered, full.to_data(), "{path}");
                    let first = param.gather_on_first(part)?.map(Tensor::into_data);
                    seen.push(first == Some(full.into_data()));
                }
                Ok::<_, ShardsError>(seen)
            });
            for (rank, seen) in found.into_iter().enumerate() {
                assert_eq!(seen.unwrap(), [rank == 0; 3]);
            }
        }
    }

    #[test]
    fn shards_of_another_group_are_refused() {
        let found = run_threads(2, GroupOptions::default(), |group| {
            let part = [FusedPart::new(8)];
            // The halves of four ranks, in a group of two.
            let spec = ShardSpec::split(&[8, 2], 0, &part, Axis::Tp, group.rank(), 4).unwrap();
            let mut plan = ShardPlan::new();
            plan.insert("w", ParamSpec { shard: spec }).unwrap();
            GroupShards::new(&plan, &group).map(|_| ())
        });
        for error in found {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("hold 4 of the 8 elements of `w`"), "{error}");
        }
    }
}
