//! Checkpoints that hold the weights of a model and nothing else: those of one checkpoint, or the
//! mean of several.

use std::path::{Path, PathBuf};

use burn::tensor::DType;
use megaburn_checkpoint::{
    Average, Checkpoint, Selection, Snapshot, TensorHeader, TensorSource, save_source,
};
use serde_json::{Value, json};

use crate::{
    assets::Assets,
    convert::check_target,
    decoder::DecoderConfig,
    error::ModelError,
    source::{ModelSource, PREFIX},
};

/// Writes the weights of the model in `from`, a checkpoint or a run, as a checkpoint without
/// optimizer and trainer state to exactly `to`. Floats are converted to `dtype`, or keep their type
/// if it is `None`; expert biases are converted to f32 if `dtype` is given. The step is that of the
/// checkpoint; a run that starts from the result begins at step 0.
///
/// One parameter is in memory at a time. An existing `to` is replaced only with `force`.
///
/// # Errors
/// See [`ModelSource::open`]; also if `from` is a model of another system, `to` exists and may not
/// be replaced, or the disk is full. No new files remain after an error.
pub fn extract_weights(
    from: &Path,
    to: &Path,
    dtype: Option<DType>,
    force: bool,
) -> Result<ModelSource, ModelError> {
    let source = open_checkpoint(from)?;
    check_target(from, to)?;
    let step = checkpoint(&source).step();
    save(&source, &params_of(&source), step, dtype, to, force)?;
    Ok(source)
}

/// Writes the element-wise weighted mean of the weights of several checkpoints (or runs) of one
/// model as a checkpoint without optimizer and trainer state to exactly `to`. The mean is computed
/// in f64 and stored in the types of the checkpoints, which must be the same. The step is the
/// largest one of them; configuration and small files are those of the first.
///
/// One parameter is in memory at a time. An existing `to` is replaced only with `force`.
///
/// # Errors
/// See [`extract_weights`] and [`Average::new`]; also if the models are not the same.
///
/// # Panics
/// If `from` is empty, or does not have a weight for each path.
pub fn average_weights(
    from: &[PathBuf],
    weights: &[f64],
    to: &Path,
    force: bool,
) -> Result<DecoderConfig, ModelError> {
    assert_eq!(from.len(), weights.len(), "each model has a weight");
    let mut sources = Vec::new();
    for path in from {
        check_target(path, to)?;
        sources.push(open_checkpoint(path)?);
    }
    let first = &sources[0];
    for other in &sources[1..] {
        check_same_model(first, other)?;
    }
    let selections: Vec<_> = sources.iter().map(params_of).collect();
    let weighted = selections.iter().zip(weights);
    let weighted = weighted.map(|(source, weight)| (source as &dyn TensorSource, *weight));
    let mean = Average::new(weighted.collect())?;
    let steps = sources.iter().map(|source| checkpoint(source).step());
    let step = steps.max().unwrap_or(0);
    save(first, &mean, step, None, to, force)?;
    Ok(first.config().clone())
}

/// Opens and verifies the checkpoint at a path, or the newest intact one of a run.
///
/// # Errors
/// See [`ModelSource::open`]; also if the path is a model of another system.
pub fn open_checkpoint(path: &Path) -> Result<ModelSource, ModelError> {
    let source = ModelSource::open_verified(path)?;
    if source.hf_dir().is_some() {
        let why = "is a Hugging Face model or a checkpoint of torchtitan; give a checkpoint or a run, or \
                   make one with `megaburn convert import`";
        return Err(ModelError::File {
            path: path.to_path_buf(),
            why: why.into(),
        });
    }
    Ok(source)
}

fn checkpoint(source: &ModelSource) -> &Checkpoint {
    source.checkpoint().expect("the source is a checkpoint")
}

/// Refuses two checkpoints whose models differ in more than the longest sequence, which does not
/// change what positions mean, unless they are learned.
fn check_same_model(first: &ModelSource, other: &ModelSource) -> Result<(), ModelError> {
    let same_length = |config: &DecoderConfig| DecoderConfig {
        max_seq_len: if config.learns_positions() {
            config.max_seq_len
        } else {
            0
        },
        ..config.clone()
    };
    let [a, b] = [first, other].map(|source| json!(same_length(source.config())));
    let keys = [&a, &b].map(|config| config.as_object().into_iter().flatten());
    let mut keys = keys.into_iter().flatten().map(|(key, _)| key.as_str());
    match keys.find(|key| a[key] != b[key]) {
        None => Ok(()),
        Some(key) => Err(ModelError::File {
            path: other.path().to_path_buf(),
            why: format!(
                "is of another model than {}: `{key}` is {} there and {} here",
                first.path().display(),
                a[key],
                b[key],
            ),
        }),
    }
}

/// The parameters of a checkpoint, without optimizer state.
fn params_of(source: &ModelSource) -> Selection<'_> {
    let is_param = |name: &str| {
        let path = name.strip_prefix(PREFIX);
        path.is_some_and(|path| source.has_param(path))
    };
    Selection::new(checkpoint(source), is_param)
}

/// Writes `tensors`, which have the names of the parameters of `source`.
fn save(
    source: &ModelSource,
    tensors: &dyn TensorSource,
    step: u64,
    dtype: Option<DType>,
    to: &Path,
    force: bool,
) -> Result<(), ModelError> {
    let snapshot = Snapshot {
        run_id: None,
        step,
        model: checkpoint(source).model().clone(),
        trainer: Value::Null,
    };
    let stored = |header: &TensorHeader| match dtype {
        None => header.dtype,
        Some(_) if source.is_buffer(&header.name[PREFIX.len()..]) => DType::F32,
        Some(dtype) => dtype,
    };
    let assets = Assets::for_checkpoint(source)?;
    Ok(save_source(to, force, &snapshot, tensors, stored, &assets)?)
}
