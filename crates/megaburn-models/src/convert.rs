//! Converts models of Hugging Face and torchtitan into checkpoints, and checkpoints into models of
//! Hugging Face, one tensor at a time.

use std::path::Path;

use burn::tensor::DType;
use megaburn_checkpoint::{
    CheckpointError, NamedTensor, Snapshot,
    hf::{HfWriteOptions, HfWritten, QUANTIZATION, write_hf},
    save_single,
};
use serde_json::{Value, json};

use crate::{
    assets::Assets,
    decoder::DecoderConfig,
    error::ModelError,
    hf::HfParam,
    quantize::QuantizedTensors,
    source::{ModelSource, PREFIX},
};

/// Imports the model of Hugging Face or torchtitan in `from` as a checkpoint at step 0, which any
/// layout can load.
/// The checkpoint is written to exactly `to`. Floats are converted to `dtype`, or keep their type
/// if it is `None`; expert biases are converted to f32 if `dtype` is given.
///
/// One parameter is in memory at a time. An existing `to` is replaced only with `force`.
///
/// # Errors
/// See [`ModelSource::open`]; also if `to` exists and may not be replaced, or the disk is full. No
/// new files remain after an error.
pub fn import(
    from: &Path,
    to: &Path,
    dtype: Option<DType>,
    force: bool,
) -> Result<ModelSource, ModelError> {
    let source = ModelSource::open(from)?;
    if source.hf_dir().is_none() {
        let why = "is already a checkpoint; give a model of Hugging Face or torchtitan".to_string();
        return Err(ModelError::File {
            path: from.to_path_buf(),
            why,
        });
    }
    check_target(from, to)?;
    let plan = source.config().whole_plan()?;
    let snapshot = Snapshot {
        run_id: None,
        step: 0,
        model: json!(source.config()),
        trainer: Value::Null,
    };
    let mut tensors = Vec::new();
    for (path, spec) in plan.iter() {
        let dtype = dtype.map(|dtype| {
            if source.is_buffer(path) {
                DType::F32
            } else {
                dtype
            }
        });
        let stored = dtype.map_or_else(|| source.dtype(path), Ok)?;
        let source = &source;
        let name = format!("{PREFIX}{path}");
        tensors.push(NamedTensor::lazy(
            name.clone(),
            &spec.shard,
            stored,
            move || {
                let data = source.shard(path, &spec.shard, Some(stored));
                data.map_err(|error| CheckpointError::Source {
                    name: name.clone(),
                    why: error.to_string(),
                })
            },
        ));
    }
    let assets = Assets::for_checkpoint(&source)?;
    save_single(to, force, &snapshot, "tp1", tensors, &assets)?;
    Ok(source)
}

/// Exports the model of a checkpoint or run as a folder that Transformers can load, with the small
/// files that were imported with it.
///
/// With a quantization, the weights of attention, MLPs and experts are written in FP8, except for those
/// that the run kept in its own type, and all others in bf16 if no type is given. Scales of blocks are
/// powers of two if those of the run were.
///
/// A few blocks of rows are in memory at a time.
///
/// # Errors
/// See [`ModelSource::open`]; also if `to` exists and may not be replaced, the disk is full, or
/// engines do not start the model with such FP8 weights. No new files remain after an error.
pub fn export(from: &Path, to: &Path, options: &HfWriteOptions) -> Result<HfWritten, ModelError> {
    let source = ModelSource::open_verified(from)?;
    if source.hf_dir().is_some() {
        let why =
            "is no checkpoint of megaburn: give a checkpoint or a run, which `megaburn convert \
                   import` makes"
                .to_string();
        return Err(ModelError::File {
            path: from.to_path_buf(),
            why,
        });
    }
    check_target(from, to)?;
    let quantized = options
        .quantization
        .map(|form| QuantizedTensors::of(&source, form))
        .transpose()?;
    let form = quantized.as_ref().map(|quantized| quantized.form);
    let (quantized, quantization) = quantized.map_or_else(Default::default, |quantized| {
        (quantized.names, quantized.config)
    });
    let dtype = options.dtype.or(form.map(|_| DType::BF16));
    let tensors = source.as_published()?;
    let mut assets = Assets::of(&source)?;
    let original = assets.json("config.json");
    let config = config_json(source.config(), original, (dtype, quantization), &*tensors)?;
    let is_scaled = source.config().multipliers.logits_scaling != 1.0;
    if source.config().is_encoder_decoder() && source.config().tied != is_scaled {
        tracing::warn!(
            "version 4 of Transformers takes the logits of a T5 to be scaled by d_model^-0.5 if its \
            embeddings are tied, and only then, but this model's embeddings are {} and its logits \
            are {}; load it with version 5 or later",
            if source.config().tied {
                "tied"
            } else {
                "not tied"
            },
            if is_scaled { "scaled" } else { "not scaled" },
        );
    }
    if let Some(mut config) = config {
        let tokens = assets.json("generation_config.json").unwrap_or_default();
        for kind in ["eos", "bos", "pad", "decoder_start"] {
            let key = format!("{kind}_token_id");
            if let (None, Some(id)) = (config.get(&key), tokens.get(&key)) {
                config[&key] = id.clone();
            }
        }
        assets.insert("config.json", format!("{config:#}\n").into_bytes());
    }
    let wide = source
        .params()
        .filter(|param| param.is_buffer)
        .flat_map(HfParam::names);
    let options = HfWriteOptions {
        dtype,
        f32_tensors: wide.collect(),
        quantization: form,
        quantized_tensors: quantized,
        ..options.clone()
    };
    Ok(write_hf(to, &*tensors, &options, &assets.published())?)
}

/// Refuses a target that would replace the source or is inside a checkpoint.
pub fn check_target(from: &Path, to: &Path) -> Result<(), ModelError> {
    let refuse = |why: String| {
        Err(ModelError::File {
            path: to.to_path_buf(),
            why,
        })
    };
    let whole = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    if let (Ok(from), Ok(to)) = (whole(from), whole(to)) {
        if from.starts_with(&to) {
            return refuse("contains the model to be converted; choose another path".into());
        }
        let above = to.ancestors().skip(1);
        if let Some(checkpoint) = above
            .into_iter()
            .find(|above| above.join("manifest.json").is_file())
        {
            let checkpoint = checkpoint.display();
            return refuse(format!(
                "is inside the checkpoint {checkpoint}; choose another path"
            ));
        }
    }
    Ok(())
}

/// The `config.json` to write; `None` if the original file describes the model already.
fn config_json(
    config: &DecoderConfig,
    mut original: Option<Value>,
    (dtype, quantization): (Option<DType>, Value),
    tensors: &dyn megaburn_checkpoint::TensorSource,
) -> Result<Option<Value>, ModelError> {
    let stored = tensors
        .headers()
        .first()
        .map_or(DType::F32, |header| header.dtype);
    let name = match dtype.unwrap_or(stored) {
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    let same_model = |json: &Value| {
        let found = DecoderConfig::from_hf(json, Path::new("config.json"));
        let found = found.map(|found| {
            if found.learns_positions() {
                return found;
            }
            // `max_seq_len` may differ: a run on shorter sequences still trains the same model.
            DecoderConfig {
                max_seq_len: config.max_seq_len,
                ..found
            }
        });
        // The file may name multi-token prediction layers whose weights were absent.
        let found = found.map(|found| match config.mtp_layers {
            0 => found.without_mtp(),
            _ => found,
        });
        found.is_ok_and(|found| found == *config)
    };
    // A model that was imported from quantised weights has others now.
    let keys = original.as_mut().and_then(Value::as_object_mut);
    let before = keys.and_then(|keys| keys.shift_remove(QUANTIZATION));
    let original = original.filter(same_model);
    let says = |json: &Value| ["dtype", "torch_dtype"].iter().any(|key| json[key] == name);
    if original.as_ref().is_some_and(says) && before.unwrap_or_default() == quantization {
        return Ok(None);
    }
    let mut json = original.unwrap_or_else(|| config.to_hf());
    config.check_sayable()?;
    json.as_object_mut()
        .map(|keys| keys.shift_remove("torch_dtype"));
    json["dtype"] = name.into();
    if !quantization.is_null() {
        json[QUANTIZATION] = quantization;
    }
    Ok(Some(json))
}
