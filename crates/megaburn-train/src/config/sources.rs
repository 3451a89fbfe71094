use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// A data set of a list in `[data]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[derive(JsonSchema)]
pub struct SourceConfig {
    /// A data set in Megatron-LM's format (`PREFIX` of `PREFIX.bin` and `PREFIX.idx`, or a URL), a
    /// text file, or generated data, such as `mock:random`.
    pub path: String,
    /// The share of its samples relative to the other data sets. If no data set of the list has a
    /// weight, each has that of its number of samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// In place of `weight`: how often it is read while another data set with `epochs = 1` is read
    /// once. Its weight is that of its number of samples times this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// In `data.train`: how it is divided, in place of `data.split`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The name of the evaluation. Data sets with the same name are mixed. Default: the last
    /// component of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// What a data set of a mixture has: all of them the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MixBy {
    NumSamples,
    Weight(f64),
    Epochs(f64),
}

impl SourceConfig {
    /// The name of the evaluation.
    pub(crate) fn name(&self) -> String {
        let last = self.path.rsplit('/').find(|part| !part.is_empty());
        let name = self.name.clone();
        name.unwrap_or_else(|| last.unwrap_or(&self.path).to_string())
    }

    /// What decides its share of the samples.
    pub(crate) fn mix_by(&self) -> MixBy {
        match (self.weight, self.epochs) {
            (Some(weight), _) => MixBy::Weight(weight),
            (None, Some(epochs)) => MixBy::Epochs(epochs),
            (None, None) => MixBy::NumSamples,
        }
    }

    /// Checks the data set without the others of its list.
    fn validate(&self, key: &'static str) -> Result<(), TrainError> {
        let rule = "a list of paths";
        require(
            !self.path.is_empty(),
            key,
            "a list with an empty path",
            rule,
        )?;
        for (what, number) in [("weight", self.weight), ("epochs", self.epochs)] {
            let is_valid = number.is_none_or(|number| number.is_finite() && number > 0.0);
            let value = format!("a list with {what} {}", number.unwrap_or_default());
            let rule = format!("a list with positive {what}; leave a data set out instead");
            require(is_valid, key, value, rule)?;
        }
        let has_both = self.weight.is_some() && self.epochs.is_some();
        let value = format!("a list with both weight and epochs of {}", self.path);
        require(!has_both, key, value, "a list with one of them")?;
        let is_train = key == TRAIN;
        let rule = "a list without names, which only evaluations have";
        require(
            !is_train || self.name.is_none(),
            key,
            "a list with names",
            rule,
        )?;
        let is_line = |name: &String| !name.is_empty() && !name.contains(char::is_control);
        let is_name = self.name.as_ref().is_none_or(is_line);
        let value = format!("a list with the name {:?}", self.name());
        require(
            is_name,
            key,
            value,
            "a list whose names are some text in one line",
        )?;
        let rule = "a list without splits, which only data.train has";
        let value = "a list with a split";
        require(is_train || self.split.is_none(), key, value, rule)?;
        self.split.as_deref().map_or(Ok(()), |split| {
            parse_split(key, &format!("a list with split {split}"), split).map(|_| ())
        })
    }
}

/// Checks a list of data sets, which is the value of `key`.
pub(super) fn validate_sources(
    key: &'static str,
    sources: &[SourceConfig],
) -> Result<(), TrainError> {
    for (index, source) in sources.iter().enumerate() {
        source.validate(key)?;
        let has_name = source.name.is_some();
        // Only those that are given the same name are meant to be mixed.
        let mut same = sources[..index]
            .iter()
            .filter(|other| other.name() == source.name());
        let is_meant = key == TRAIN || same.all(|other| has_name && other.name.is_some());
        let value = format!("a list with {} twice", source.name());
        let rule = "a list whose data sets have different names; set `name`";
        require(is_meant, key, value, rule)?;
        // Within an evaluation, and in training.
        let is_mixed = |other: &&SourceConfig| key == TRAIN || other.name() == source.name();
        let mut others = sources[..index].iter().filter(is_mixed);
        let is_new = others.clone().all(|other| other.path != source.path);
        let value = format!("a list with {} twice", source.path);
        let rule = "a list of different data sets; give one of them the weight";
        require(is_new, key, value, rule)?;
        let kind = |source: &SourceConfig| (source.weight.is_some(), source.epochs.is_some());
        let is_like = others.all(|other| kind(other) == kind(source));
        let rule = "a list in which all data sets that are mixed have a weight, or all have \
            epochs, or none has either";
        let value = format!("a list in which {} differs from others", source.path);
        require(is_like, key, value, rule)?;
    }
    Ok(())
}

/// The weights of a split, which messages call `value` of `key`.
///
/// # Errors
/// It is not a list of up to three numbers of which the first is positive.
pub(super) fn parse_split(
    key: &'static str,
    value: &str,
    split: &str,
) -> Result<Vec<f64>, TrainError> {
    let weights = split.split(',').map(|weight| weight.trim().parse().ok());
    let weights: Option<Vec<f64>> = weights.collect();
    let is_split = |weights: &Vec<f64>| {
        weights.len() <= 3
            && weights
                .iter()
                .all(|weight| weight.is_finite() && *weight >= 0.0)
    };
    let weights = weights.filter(is_split).unwrap_or_default();
    let value = if value.is_empty() { "empty" } else { value };
    let rule = "up to three numbers of 0 or more separated by commas, like 969,30,1";
    require(!weights.is_empty(), key, value, rule)?;
    let rule = "weights of which the first is above 0";
    require(weights[0] > 0.0, key, value, rule)?;
    Ok(weights)
}

/// The key of the training data sets.
pub(super) const TRAIN: &str = "data.train";
