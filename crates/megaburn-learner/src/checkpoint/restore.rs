//! Loads a checkpoint.

use std::path::Path;

use burn::module::Module;
use megaburn_checkpoint::{Checkpoint, checkpoint_path};
use megaburn_mesh::{Axis, ShardSpec};

use super::{
    MODEL, model_name,
    optimizer::{optimizer_record, state_name},
    state::{LearnerState, scheduler_record},
};
use crate::{error::LearnerError, parts::Parts, values::map_values};

/// Loads the checkpoint of `epoch`, and returns the id of its run.
///
/// # Errors
/// It cannot be read, is damaged, or is one of another program or model.
pub(super) fn restore<M: Module>(
    folder: &Path,
    epoch: u64,
    parts: &mut Parts<M>,
) -> Result<String, LearnerError> {
    let path = checkpoint_path(folder, epoch);
    let checkpoint = Checkpoint::open(&path)?;
    let state = LearnerState::from_json(checkpoint.trainer(), &path)?;
    for name in checkpoint.manifest().tensors.keys() {
        let path = name.strip_prefix(MODEL);
        if path.is_some_and(|path| parts.plan.get(path).is_none()) {
            let name = name.clone();
            let path = checkpoint.path().to_path_buf();
            return Err(LearnerError::OtherModel { path, name });
        }
    }
    let mut ids = Vec::new();
    parts.map_model(|model, plan| {
        map_values(model, |value| {
            ids.push((value.id, value.path.to_owned()));
            let spec = plan.get(value.path).expect("the plan has all parameters");
            let name = model_name(value.path);
            let dtype = checkpoint.dtype(&name)?;
            Ok(Some(checkpoint.read(&name, &spec.shard, dtype)?))
        })
    })?;
    let plan = &parts.plan;
    let record = optimizer_record(&state.optimizer, &ids, |path, field| {
        let param = plan.get(path).expect("the plan has all parameters");
        let name = state_name(path, field);
        let full = checkpoint.global_shape(&name)?;
        let dtype = checkpoint.dtype(&name)?;
        let is_split = param.shard.local_shape() != param.shard.global_shape;
        if parts.full_state.contains(path) || !is_split {
            let all = ShardSpec::whole(full, Axis::Tp, 0, 1);
            return Ok(checkpoint.read(&name, &all, dtype)?);
        }
        if full != param.shard.global_shape {
            return Err(LearnerError::OptimizerState {
                path: path.to_owned(),
                field: field.to_owned(),
                shape: full.to_vec(),
                param: param.shard.local_shape(),
            });
        }
        Ok(checkpoint.read(&name, &param.shard, dtype)?)
    })?;
    parts.optimizer = parts.optimizer.clone().load_record(record);
    let scheduler = scheduler_record(&state.scheduler)?;
    parts.scheduler = parts.scheduler.clone().load_record(scheduler);
    let run_id = checkpoint.manifest().run_id.clone();
    Ok(run_id.unwrap_or_default())
}
