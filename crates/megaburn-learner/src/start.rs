//! Broadcasts the values that ranks share from the first rank that has them.

use std::collections::BTreeMap;

use burn::{module::Module, tensor::TensorData};
use megaburn_collective::{ProcessGroups, ReduceOp};
use megaburn_mesh::{ShardPlan, ShardSpec};

use crate::{error::LearnerError, values::map_values};

/// Whether every rank of the tensor-parallel group has all of the parameter.
fn is_replicated(spec: &ShardSpec) -> bool {
    spec.local_shape() == spec.global_shape && spec.pieces.iter().any(|piece| piece.replicas > 1)
}

/// Broadcasts parameters from the first rank that has them, as PyTorch's DDP does: Burn draws the
/// weights of its own layers from one generator per process, so rank threads draw different ones.
/// `buffers` remembers the values that are not trained.
///
/// # Collective
/// All ranks; each parameter is sent over dp, and replicated ones over tp.
pub(crate) fn synchronized<M: Module>(
    module: M,
    plan: &ShardPlan,
    groups: &ProcessGroups,
    buffers: &mut Buffers,
) -> Result<M, LearnerError> {
    map_values(module, |value| {
        let data = sent(
            (value.read)(),
            plan.get(value.path).map(|it| &it.shard),
            groups,
        )?;
        if !value.is_trained {
            buffers.values.insert(value.path.to_owned(), data.clone());
        }
        Ok(Some(data))
    })
}

/// The first rank's values.
fn sent(
    mut data: TensorData,
    spec: Option<&ShardSpec>,
    groups: &ProcessGroups,
) -> Result<TensorData, LearnerError> {
    if groups.dp.size() > 1 {
        data = groups.dp.broadcast(data, 0)?;
    }
    if groups.tp.size() > 1 && spec.is_some_and(is_replicated) {
        data = groups.tp.broadcast(data, 0)?;
    }
    Ok(data)
}

/// The values of a module that are not trained: frozen parameters, and buffers such as the running
/// statistics of a batch norm.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The last known values. Those that did not change in the first epoch are frozen, and are left
    /// out afterwards.
    values: BTreeMap<String, TensorData>,
    knows_frozen: bool,
}

impl Buffers {
    /// Broadcasts the values that changed from the first rank, so that all ranks validate and save
    /// the same model.
    ///
    /// # Collective
    /// All ranks; one byte for each value, and the values that changed on any rank.
    pub(crate) fn synchronized<M: Module>(
        &mut self,
        module: M,
        plan: &ShardPlan,
        groups: &ProcessGroups,
    ) -> Result<M, LearnerError> {
        if self.values.is_empty() || groups.world.size() == 1 {
            return Ok(module);
        }
        // A running state hands its newest update over when a module is prepared for inference.
        drop(module.valid());
        if !self.knows_frozen {
            self.leave_out_frozen(module.clone(), groups)?;
        }
        let known = &self.values;
        map_values(module, |value| {
            if !known.contains_key(value.path) {
                return Ok(None);
            }
            let spec = plan.get(value.path).map(|param| &param.shard);
            sent((value.read)(), spec, groups).map(Some)
        })
    }

    fn leave_out_frozen<M: Module>(
        &mut self,
        module: M,
        groups: &ProcessGroups,
    ) -> Result<(), LearnerError> {
        let mut changed: BTreeMap<&str, bool> = BTreeMap::new();
        map_values(module, |value| {
            if let Some((path, known)) = self.values.get_key_value(value.path) {
                changed.insert(path, (value.read)() != *known);
            }
            Ok(None)
        })?;
        let mine: Vec<u8> = changed.values().map(|&it| u8::from(it)).collect();
        let mine = TensorData::from(mine.as_slice());
        let any = groups.world.all_reduce(mine, ReduceOp::Max)?;
        let changed = changed.keys().zip(any.as_bytes());
        let frozen = changed.filter(|&(_, &byte)| byte == 0);
        let frozen: Vec<String> = frozen.map(|(path, _)| (*path).to_owned()).collect();
        for path in frozen {
            self.values.remove(&path);
        }
        self.knows_frozen = true;
        Ok(())
    }
}
