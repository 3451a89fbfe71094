//! What `quantization_config` in `config.json` says about the weights of a published model.

use std::path::Path;

use serde_json::{Value, json};

use super::scaling::Scaling;
use crate::{error::CheckpointError, hf::json::read_json};

/// The key of `config.json` that says how weights are quantised.
pub const QUANTIZATION: &str = "quantization_config";
/// The key of early versions of compressed-tensors.
const COMPRESSION: &str = "compression_config";
/// The file in which older versions of TensorRT Model Optimizer say it.
const MODEL_OPTIMIZER: &str = "hf_quant_config.json";

/// How the FP8 weights of a model are scaled.
#[derive(Debug, Default)]
pub(super) struct Scalings {
    /// The ways, of which the shape of a tensor's scales tells the one that holds for it. There is
    /// none if only activations or caches are quantised.
    pub(super) ways: Vec<Scaling>,
    /// Whether scales that are stored as unsigned bytes are numbers in E8M0 (MXFP8 of
    /// compressed-tensors).
    pub(super) are_bytes_e8m0: bool,
}

impl From<Vec<Scaling>> for Scalings {
    fn from(ways: Vec<Scaling>) -> Self {
        Self {
            ways,
            ..Self::default()
        }
    }
}

/// Refuses a `config.json` whose weights are quantised by a method that megaburn does not read.
///
/// Read are FP8 weights of these `quant_method`s: `fp8` (DeepSeek-V3, Qwen3, vLLM),
/// `compressed-tensors` (llm-compressor), `fbgemm_fp8` (Llama 3.1 405B) and `modelopt` (TensorRT
/// Model Optimizer).
///
/// # Errors
/// The method, and what to do instead.
pub fn check_method(config: &Value) -> Result<(), String> {
    scalings(config).map(|_| ())
}

/// The content of `config.json`, with the entry under its name of today: early versions of
/// compressed-tensors called it [`COMPRESSION`], and Model Optimizer has it in a file of its own.
/// An entry that is there already stays.
///
/// # Errors
/// The file cannot be read.
pub(in crate::hf) fn with_method_of_file(
    mut config: Value,
    folder: &Path,
) -> Result<Value, CheckpointError> {
    let early = config.get_mut(COMPRESSION).map(Value::take);
    if let (true, Some(Value::Object(mut said))) = (config[QUANTIZATION].is_null(), early) {
        let groups = said.get("config_groups").and_then(Value::as_object);
        if groups.is_some_and(|groups| !groups.is_empty()) {
            said.insert("quant_method".into(), json!("compressed-tensors"));
            config[QUANTIZATION] = said.into();
        }
    }
    let path = folder.join(MODEL_OPTIMIZER);
    if config[QUANTIZATION].is_null() && path.is_file() {
        let said: Value = read_json(&path)?;
        let algorithm = said["quantization"]["quant_algo"].clone();
        config[QUANTIZATION] = json!({ "quant_method": "modelopt", "quant_algo": algorithm });
    }
    Ok(config)
}

/// How the FP8 weights of a model are scaled; `None` if `config.json` does not say that it has any.
///
/// # Errors
/// The method is not read.
pub(super) fn scalings(config: &Value) -> Result<Option<Scalings>, String> {
    let said = &config[QUANTIZATION];
    if said.is_null() {
        return Ok(None);
    }
    let method = said["quant_method"].as_str().unwrap_or("unknown");
    let found = match method {
        "fp8" => fine_grained(said),
        "compressed-tensors" => compressed_tensors(said),
        "fbgemm_fp8" => Ok(vec![Scaling::Channel].into()),
        "modelopt" => model_optimizer(said),
        _ => Err("this method is not supported".to_string()),
    };
    found.map(Some).map_err(|why| {
        format!(
            "`{QUANTIZATION}` is set to `{method}`: {why}. Weights are read in bf16, f16, f32, and in \
            FP8 of the methods fp8, compressed-tensors, fbgemm_fp8 and modelopt; use the bf16 \
            checkpoint"
        )
    })
}

/// `fp8` of Transformers and vLLM: blocks if their size is given, else one scale per tensor.
fn fine_grained(said: &Value) -> Result<Scalings, String> {
    match &said["weight_block_size"] {
        Value::Null => Ok(vec![Scaling::Tensor, Scaling::Channel].into()),
        size => Ok(vec![Scaling::Block(block_size(size)?)].into()),
    }
}

fn compressed_tensors(said: &Value) -> Result<Scalings, String> {
    let sparsity = said["sparsity_config"]["format"].as_str();
    if let Some(format) = sparsity.filter(|format| *format != "dense") {
        return Err(format!("its weights are sparse (`{format}`)"));
    }
    let transforms = said["transform_config"]["config_groups"].as_object();
    if transforms.is_some_and(|groups| !groups.is_empty()) {
        return Err("its weights are rotated (`transform_config`)".into());
    }
    let groups = said["config_groups"].as_object();
    let groups = groups.filter(|groups| !groups.is_empty());
    if groups.is_none() && !said["kv_cache_scheme"].is_null() {
        return Ok(Scalings::default());
    }
    let groups = groups.ok_or("`config_groups` is missing")?;
    // Groups without weights quantise activations or caches only.
    let of_weights = || {
        let groups = groups.iter();
        groups.filter(|(_, group)| !group["weights"].is_null())
    };
    let ways = of_weights().map(compressed_weights);
    let are_bytes = |(_, group): (&String, &Value)| {
        group["weights"]["scale_dtype"]
            .as_str()
            .is_some_and(|dtype| dtype.ends_with("uint8"))
    };
    Ok(Scalings {
        ways: ways.collect::<Result<_, _>>()?,
        are_bytes_e8m0: of_weights().any(are_bytes),
    })
}

/// How the weights of a group of compressed-tensors are scaled.
fn compressed_weights((name, group): (&String, &Value)) -> Result<Scaling, String> {
    let weights = &group["weights"];
    let [bits, kind] = [&weights["num_bits"], &weights["type"]];
    if (bits.as_u64(), kind.as_str()) != (Some(8), Some("float")) {
        return Err(format!(
            "the weights of `{name}` have `num_bits` {bits} and `type` {kind}, not 8 and \"float\""
        ));
    }
    if weights["symmetric"] == false {
        return Err(format!("the weights of `{name}` have zero points"));
    }
    match weights["strategy"].as_str() {
        Some("tensor") => Ok(Scaling::Tensor),
        Some("channel") => Ok(Scaling::Channel),
        Some("block") => Ok(Scaling::Block(block_size(&weights["block_structure"])?)),
        Some("group") => {
            let size = weights["group_size"].as_u64().filter(|size| *size > 0);
            let size = size.ok_or("`group_size` is missing")?;
            Ok(Scaling::Block([1, size as usize]))
        }
        _ => Err(format!(
            "the weights of `{name}` have the strategy {}; known are tensor, channel, block and \
            group",
            weights["strategy"]
        )),
    }
}

/// Newer versions have `quant_algo` in `config.json`.
fn model_optimizer(said: &Value) -> Result<Scalings, String> {
    match said["quant_algo"].as_str() {
        Some("FP8") => Ok(vec![Scaling::Tensor].into()),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => Ok(vec![Scaling::Channel].into()),
        _ => Err(format!("`quant_algo` is {}", said["quant_algo"])),
    }
}

/// Rows and columns of a block: `[128, 128]`, or `"128x128"` as in some versions of
/// compressed-tensors.
fn block_size(said: &Value) -> Result<[usize; 2], String> {
    let sizes: Vec<u64> = match said {
        Value::String(text) => text.split('x').flat_map(str::parse).collect(),
        _ => said
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64)
            .collect(),
    };
    match *sizes.as_slice() {
        [tall, wide] if tall > 0 && wide > 0 => Ok([tall as usize, wide as usize]),
        _ => Err(format!(
            "its block size is {said}, but must be two numbers, rows and columns"
        )),
    }
}
