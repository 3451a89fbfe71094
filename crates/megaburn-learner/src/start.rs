//! The same values on ranks that should have them.

use burn::module::Module;
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{ShardPlan, ShardSpec};

use crate::{error::LearnerError, values::map_values};

/// Whether every rank of the tensor-parallel group has all of the parameter.
fn is_replicated(spec: &ShardSpec) -> bool {
    spec.local_shape() == spec.global_shape && spec.pieces.iter().any(|piece| piece.replicas > 1)
}

/// Sets parameters to those of the first rank that has them, as PyTorch's DDP does: Burn draws the
/// weights of its own layers from one generator per process, so rank threads draw different ones.
///
/// # Collective
/// All ranks; each parameter is sent over dp, and replicated ones over tp.
pub(crate) fn synchronized<M: Module>(
    module: M,
    plan: &ShardPlan,
    groups: &ProcessGroups,
) -> Result<M, LearnerError> {
    send(module, plan, groups, |_| true)
}

/// Sets buffers, such as the running statistics of a batch norm, to those of the first rank, so that
/// all ranks validate the same model.
///
/// # Collective
/// As [`synchronized`], for frozen parameters and buffers.
pub(crate) fn synchronized_buffers<M: Module>(
    module: M,
    plan: &ShardPlan,
    groups: &ProcessGroups,
) -> Result<M, LearnerError> {
    send(module, plan, groups, |is_trained| !is_trained)
}

fn send<M: Module>(
    module: M,
    plan: &ShardPlan,
    groups: &ProcessGroups,
    is_wanted: impl Fn(bool) -> bool,
) -> Result<M, LearnerError> {
    map_values(module, |value| {
        let spec = plan.get(value.path).map(|param| &param.shard);
        let over_tp = groups.tp.size() > 1 && spec.is_some_and(is_replicated);
        let over_dp = groups.dp.size() > 1;
        if !is_wanted(value.is_trained) || !(over_tp || over_dp) {
            return Ok(None);
        }
        let mut data = (value.read)();
        if over_dp {
            data = groups.dp.broadcast(data, 0)?;
        }
        if over_tp {
            data = groups.tp.broadcast(data, 0)?;
        }
        Ok(Some(data))
    })
}
