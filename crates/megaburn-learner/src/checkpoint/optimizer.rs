//! The state of one of Burn's optimizers, with the parts of it that a rank holds.

use std::collections::BTreeMap;

use burn::{module::ParamId, optim::OptimizerRecord, tensor::TensorData};
use burn_pack::{Tensor, Writer};
use megaburn_collective::ProcessGroups;
use megaburn_mesh::{Axis, ShardSpec};

use super::state::{ParamState, read, written};
use crate::{error::LearnerError, parts::Parts};

/// One tensor of an optimizer's state.
pub(super) struct StateTensor {
    path: String,
    field: String,
    pub(super) spec: ShardSpec,
    pub(super) data: TensorData,
}

impl StateTensor {
    /// Its name in a checkpoint.
    pub(super) fn name(&self) -> String {
        state_name(&self.path, &self.field)
    }
}

/// The name of a parameter's state in a checkpoint.
pub(super) fn state_name(path: &str, field: &str) -> String {
    format!("optimizer.{field}.{path}")
}

/// An optimizer's state, by the paths of parameters.
#[derive(Default)]
pub(super) struct SavedOptimizer {
    pub(super) tensors: Vec<StateTensor>,
    scalars: BTreeMap<String, ParamState>,
}

impl SavedOptimizer {
    /// The state other than the values of tensors.
    pub(super) fn state(&self) -> BTreeMap<String, ParamState> {
        let mut state: BTreeMap<String, ParamState> = BTreeMap::new();
        for (path, of_param) in &self.scalars {
            let scalars = of_param.scalars.clone();
            let entry = state.entry(path.clone()).or_default();
            entry.scalars = scalars;
        }
        for StateTensor { path, field, .. } in &self.tensors {
            let entry = state.entry(path.clone()).or_default();
            entry.tensors.push(field.clone());
        }
        state
    }
}

/// The state of the optimizer. `ids` names the parameters.
///
/// # Errors
/// A state tensor of a split parameter has another shape than the parameter.
pub(super) fn saved_optimizer<M>(
    parts: &Parts<M>,
    ids: &[(ParamId, String)],
    groups: &ProcessGroups,
) -> Result<SavedOptimizer, LearnerError> {
    let paths: BTreeMap<String, &String> = ids
        .iter()
        .map(|(id, path)| (id.val().to_string(), path))
        .collect();
    // Burn names state `{id}.{field}`. State of a parameter that the module no longer has is left.
    let named = |name: &str| {
        let (id, field) = name.split_once('.')?;
        Some(((*paths.get(id)?).clone(), field.to_owned()))
    };
    let reader = read(parts.optimizer.to_record().into_bytes()?)?;
    let mut saved = SavedOptimizer::default();
    for (name, value) in reader.scalars() {
        if let Some((path, field)) = named(name) {
            let of_param = saved.scalars.entry(path).or_default();
            of_param.scalars.insert(field, *value);
        }
    }
    let record = |error: burn_pack::Error| LearnerError::Record(error.to_string());
    for tensor in reader.into_tensors().map_err(record)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(record)?;
        let Some((path, field)) = named(&name) else {
            continue;
        };
        let param = parts.plan.get(&path).expect("the plan has all parameters");
        let is_full = parts.full_state.contains(&path);
        let spec = state_spec(&param.shard, is_full, &shape, groups);
        let spec = spec.ok_or_else(|| LearnerError::OptimizerState {
            path: path.clone(),
            field: field.clone(),
            shape: shape.to_vec(),
            param: param.shard.local_shape(),
        })?;
        saved.tensors.push(StateTensor {
            path,
            field,
            spec,
            data: TensorData::from_bytes(bytes, shape, dtype),
        });
    }
    Ok(saved)
}

/// Returns which part of the full state a rank holds, given the `shape` of the rank's state. The state
/// is split as the parameter is, unless it `is_full` or the parameter is not split. Returns `None` if
/// the shape fits neither.
fn state_spec(
    param: &ShardSpec,
    is_full: bool,
    shape: &[usize],
    groups: &ProcessGroups,
) -> Option<ShardSpec> {
    let local = param.local_shape();
    if !is_full && local == shape {
        return Some(param.clone());
    }
    let tp = &groups.tp;
    (is_full || local == param.global_shape)
        .then(|| ShardSpec::whole(shape, Axis::Tp, tp.rank(), tp.size()))
}

/// The record of state that `read` returns by path and field.
pub(super) fn optimizer_record(
    state: &BTreeMap<String, ParamState>,
    ids: &[(ParamId, String)],
    mut read: impl FnMut(&str, &str) -> Result<TensorData, LearnerError>,
) -> Result<OptimizerRecord, LearnerError> {
    let mut tensors = Vec::new();
    let mut scalars = Vec::new();
    for (id, path) in ids {
        let Some(of_param) = state.get(path) else {
            continue;
        };
        for field in &of_param.tensors {
            let (bytes, shape, dtype) = read(path, field)?.into_parts();
            let name = format!("{}.{field}", id.val());
            tensors.push(Tensor::new(name, dtype, shape, Some(id.val()), bytes));
        }
        for (field, value) in &of_param.scalars {
            scalars.push((format!("{}.{field}", id.val()), *value));
        }
    }
    let mut writer = Writer::new(tensors);
    for (name, value) in scalars {
        writer = writer.with_scalar(&name, value);
    }
    for (id, path) in ids {
        writer = writer.with_metadata(&id.val().to_string(), path);
    }
    Ok(OptimizerRecord::from_bytes(written(writer)?)?)
}
