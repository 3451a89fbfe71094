use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// A data set of a list in `[data]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct SourceConfig {
    /// A data set in Megatron-LM's format (`PREFIX` of `PREFIX.bin` and `PREFIX.idx`), or a text
    /// file.
    pub path: String,
    /// The share of its samples relative to the other data sets. If no data set of the list has a
    /// weight, each has that of its number of samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The name of the evaluation. Data sets with the same name are mixed. Default: the last
    /// component of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl SourceConfig {
    /// The name of the evaluation.
    pub(crate) fn name(&self) -> String {
        let last = self.path.rsplit('/').find(|part| !part.is_empty());
        let name = self.name.clone();
        name.unwrap_or_else(|| last.unwrap_or(&self.path).to_string())
    }
}

/// Checks a list of data sets, which is the value of `key`.
pub(super) fn validate_sources(
    key: &'static str,
    sources: &[SourceConfig],
) -> Result<(), TrainError> {
    for (index, source) in sources.iter().enumerate() {
        require(
            !source.path.is_empty(),
            key,
            "a list with an empty path",
            "a list of paths",
        )?;
        let is_valid = source
            .weight
            .is_none_or(|weight| weight.is_finite() && weight > 0.0);
        let value = format!("a list with weight {}", source.weight.unwrap_or_default());
        require(
            is_valid,
            key,
            value,
            "a list with positive weights; leave a data set out instead",
        )?;
        let has_name = source.name.is_some();
        let rule = "a list without names, which only evaluations have";
        require(key != TRAIN || !has_name, key, "a list with names", rule)?;
        // Only those that are given the same name are meant to be mixed.
        let mut same = sources[..index]
            .iter()
            .filter(|other| other.name() == source.name());
        let is_meant = key == TRAIN || same.all(|other| has_name && other.name.is_some());
        let value = format!("a list with {} twice", source.name());
        require(
            is_meant,
            key,
            value,
            "a list whose data sets have different names; set `name`",
        )?;
        // Within an evaluation, and in training.
        let is_mixed = |other: &&SourceConfig| key == TRAIN || other.name() == source.name();
        let mut others = sources[..index].iter().filter(is_mixed);
        let is_new = others.clone().all(|other| other.path != source.path);
        let value = format!("a list with {} twice", source.path);
        require(
            is_new,
            key,
            value,
            "a list of different data sets; give one of them the weight",
        )?;
        let is_like = others.all(|other| other.weight.is_some() == source.weight.is_some());
        let rule = "a list in which all data sets that are mixed have a weight, or none";
        let value = format!("a list in which {} differs from others", source.path);
        require(is_like, key, value, rule)?;
    }
    Ok(())
}

/// The key of the training data sets.
pub(super) const TRAIN: &str = "data.train";
