use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{MeshError, ShardSpec};

/// What a trainer must know of one parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// Which part of the global parameter this rank holds.
    pub shard: ShardSpec,
}

impl ParamSpec {
    /// Whether weight decay applies: judged on the logical rank, never on a flat shard.
    pub fn decays(&self) -> bool {
        self.shard.global_shape.len() >= 2
    }

    /// Whether it is of an expert ([`ShardSpec::is_expert`]): which ranks hold copies of it.
    pub fn is_expert(&self) -> bool {
        self.shard.is_expert()
    }
}

/// Every parameter of a rank's module by its path (`layers.0.attention.qkv.weight`), in path order.
///
/// It does not apply sharding; the layers are built sharded. It describes it, for initialisation,
/// norm counting, checkpoints, resharding and export. Burn's `ParamId` is random in every process
/// and therefore never a key.
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
    /// There is one already.
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

    /// All parameters in path order, which is the same on every rank.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ParamSpec)> {
        self.params.iter().map(|(path, spec)| (path.as_str(), spec))
    }

    /// How many parameters (tensors) there are.
    pub fn len(&self) -> usize {
        self.params.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Elements of the whole model, each logical one once.
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
    use crate::Axis;

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
