use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{error::MeshError, shard::ShardSpec};

/// The properties of a parameter that a trainer needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// The part of the global parameter that this rank holds.
    pub shard: ShardSpec,
}

impl ParamSpec {
    /// Whether weight decay applies. This depends on the logical rank, never on that of a flat
    /// shard.
    pub fn decays(&self) -> bool {
        self.shard.global_shape.len() >= 2
    }

    /// Whether it belongs to an expert ([`ShardSpec::is_expert`]), which determines the ranks that
    /// hold copies.
    pub fn is_expert(&self) -> bool {
        self.shard.is_expert()
    }
}

/// All parameters of a rank's module, by path (`layers.0.attention.qkv.weight`) and in path order.
///
/// The plan does not apply sharding (the layers are built sharded) but describes it, for
/// initialization, gradient norms, checkpoints, resharding and export. Burn's `ParamId` is random
/// in every process and is therefore never used as a key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPlan {
    params: BTreeMap<String, ParamSpec>,
}

impl ShardPlan {
    /// An empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the parameter at `path`.
    ///
    /// # Errors
    /// There is already a parameter at `path`.
    pub fn insert(&mut self, path: impl Into<String>, spec: ParamSpec) -> Result<(), MeshError> {
        let path = path.into();
        if self.params.contains_key(&path) {
            return Err(MeshError::DuplicateParam { path });
        }
        self.params.insert(path, spec);
        Ok(())
    }

    /// The parameter at `path`.
    pub fn get(&self, path: &str) -> Option<&ParamSpec> {
        self.params.get(path)
    }

    /// Marks the parameter at `path` as copy `copy` of one that ranks outside its axis hold too
    /// ([`ShardSpec::copy`]). Returns whether there is one.
    pub fn mark_copy(&mut self, path: &str, copy: usize) -> bool {
        let spec = self.params.get_mut(path);
        spec.is_some_and(|spec| {
            spec.shard = spec.shard.clone().copy(copy);
            true
        })
    }

    /// All parameters in path order, which is the same on every rank.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ParamSpec)> {
        self.params.iter().map(|(path, spec)| (path.as_str(), spec))
    }

    /// The number of parameters (tensors).
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether the plan has no parameters.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// The number of elements of the full model; each logical element counts once.
    pub fn num_global(&self) -> usize {
        self.params
            .values()
            .map(|spec| spec.shard.num_global())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::axis::Axis;

    #[test]
    fn a_parameter_of_the_expert_grid_is_an_experts() {
        let of = |axis| ParamSpec {
            shard: ShardSpec::whole(&[3, 2], axis, 0, 2),
        };
        assert!(
            [Axis::Etp, Axis::Ep]
                .into_iter()
                .all(|axis| of(axis).is_expert())
        );
        assert!(!of(Axis::Tp).is_expert());
    }
}
