//! The part of a checkpoint that is not tensors.

use std::{collections::BTreeMap, path::Path};

use burn::{
    lr_scheduler::{LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler},
    tensor::Bytes,
};
use burn_pack::{Reader, Scalar, Writer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::LearnerError;

/// Numbers by name.
pub(super) type Scalars = BTreeMap<String, Scalar>;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LearnerState {
    pub(super) scheduler: Scalars,
    /// For each parameter with state, by path.
    pub(super) optimizer: BTreeMap<String, ParamState>,
}

/// The optimizer's state of a parameter.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ParamState {
    /// The names of its tensors.
    pub(super) tensors: Vec<String>,
    pub(super) scalars: Scalars,
}

impl LearnerState {
    pub(super) fn into_json(self) -> Value {
        json!({ "learner": self })
    }

    /// # Errors
    /// The checkpoint at `path` was saved by another program.
    pub(super) fn from_json(value: &Value, path: &Path) -> Result<Self, LearnerError> {
        let state = value.get("learner").cloned().unwrap_or_default();
        let path = path.to_path_buf();
        serde_json::from_value(state).map_err(|_| LearnerError::NotOfLearner { path })
    }
}

pub(super) fn scheduler_scalars(scheduler: &ModuleLrScheduler) -> Result<Scalars, LearnerError> {
    let bytes = scheduler.to_record().into_bytes()?;
    Ok(read(bytes)?.scalars().clone())
}

pub(super) fn scheduler_record(scalars: &Scalars) -> Result<LrSchedulerRecord, LearnerError> {
    let writer = scalars
        .iter()
        .fold(Writer::new(Vec::new()), |writer, (name, value)| {
            writer.with_scalar(name, *value)
        });
    Ok(LrSchedulerRecord::from_bytes(written(writer)?)?)
}

/// Opens a record's bytes.
pub(super) fn read(bytes: Bytes) -> Result<Reader, LearnerError> {
    Reader::from_bytes(bytes).map_err(|error| LearnerError::Record(error.to_string()))
}

/// The bytes of a record.
pub(super) fn written(writer: Writer) -> Result<Bytes, LearnerError> {
    let bytes = writer.into_bytes();
    bytes.map_err(|error| LearnerError::Record(error.to_string()))
}
