//! Turns the tensors of files into those that are read: FP8 weights and their scales become one
//! tensor of floats.

use std::{path::Path, sync::Arc};

use burn::tensor::DType;
use serde_json::Value;

use super::{
    bytes::DequantizedBytes,
    float8::Float8,
    found::{Codes, Found, FoundTensors, Scales},
    method::{Scalings, scalings},
    scaling::Scaling,
};
use crate::{
    error::CheckpointError,
    hf::{
        tensor::{HfTensor, Tensors},
        warn_once::warn_once,
    },
};

/// The tensors of a folder that can be read.
#[derive(Debug, Default)]
pub(in crate::hf) struct Readable {
    /// All tensors. FP8 tensors are read in the type that `config.json` names for the model.
    pub(in crate::hf) tensors: Tensors,
    /// The FP8 tensors in f32, before they are rounded to that type.
    pub(in crate::hf) wide: Tensors,
}

/// What to do about scales that are not read.
const USE_BF16: &str = "use the bf16 checkpoint";
/// The ends of the names of a weight's scales.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// The last parts of the names of tensors that quantise activations and caches, not weights.
const OF_ACTIVATIONS: [&str; 9] = [
    "input_scale",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "prob_scale",
];

/// Returns the tensors of the folder `path` that can be read. Scales are not among them: weights
/// are read with their scales, and the scales of activations are not used.
///
/// # Errors
/// `config.json` names a method that is not read, or none; an FP8 tensor has no scales, or they have
/// another shape or type; a tensor of floats has scales; a tensor has an element type that is not
/// read.
pub(in crate::hf) fn readable(
    path: &Path,
    config: &Value,
    mut found: FoundTensors,
) -> Result<Readable, CheckpointError> {
    let mut result = Readable::default();
    let is_plain = found.values().all(|found| matches!(found, Found::Plain(_)));
    let scalings = match scalings(config) {
        Ok(scalings) => scalings,
        // Whoever reads a model refuses the method. Plain tensors can be compared all the same.
        Err(_) if is_plain => None,
        Err(why) => {
            let path = path.to_path_buf();
            return Err(CheckpointError::Quantized { path, why });
        }
    };
    if scalings.is_some() {
        leave_out_activations(path, &mut found);
    }
    let is_weight =
        |found: &Found| matches!(found, Found::Codes(codes) if codes.format != Float8::E8m0);
    let weights = found.iter().filter(|(_, found)| is_weight(found));
    let weights: Vec<String> = weights.map(|(name, _)| name.clone()).collect();
    let dtype = dtype_of(config);
    for name in weights {
        let Some(Found::Codes(codes)) = found.remove(&name) else {
            continue;
        };
        let refuse = |why: String| CheckpointError::QuantizedTensor {
            file: codes.bytes.path().to_path_buf(),
            name: name.clone(),
            dtype: codes.format.name(),
            why,
        };
        let scalings = scalings.as_ref().ok_or_else(|| {
            let why = "config.json has no `quantization_config`, which says how it is scaled: use \
                the one that the model was published with";
            refuse(why.into())
        })?;
        if scalings.ways.is_empty() {
            let why = "by `quantization_config` in config.json no weights are quantised: use the \
                config.json that the model was published with";
            return Err(refuse(why.into()));
        }
        let ends = SCALES.map(|end| format!("{name}{end}"));
        let scales = ends
            .iter()
            .find_map(|name| Some((name, found.remove(name)?)));
        let (of, scales) = scales.ok_or_else(|| {
            let [a, b] = &ends;
            refuse(format!(
                "it has no scales: there is neither `{a}` nor `{b}`; get all files of the model"
            ))
        })?;
        for (dtype, tensors) in [(dtype, &mut result.tensors), (DType::F32, &mut result.wide)] {
            let tensor = dequantized(&codes, (of, &scales), scalings, dtype).map_err(refuse)?;
            tensors.insert(name.clone(), tensor);
        }
    }
    refuse_left_scales(path, &found)?;
    for (name, found) in found {
        let (dtype, bytes) = match found {
            Found::Plain(tensor) => {
                result.tensors.insert(name, tensor);
                continue;
            }
            Found::Codes(Codes { format, bytes, .. }) => (format.name().to_string(), bytes),
            Found::Unreadable { dtype, bytes } => (dtype, bytes),
        };
        let file = bytes.path().to_path_buf();
        return Err(CheckpointError::UnreadableDtype { file, name, dtype });
    }
    Ok(result)
}

/// Refuses floats that have scales, because it is not known whether they were multiplied by them.
fn refuse_left_scales(path: &Path, found: &FoundTensors) -> Result<(), CheckpointError> {
    for (scales, weight) in found.keys().flat_map(|scales| {
        let weights = SCALES.iter().filter_map(|end| scales.strip_suffix(end));
        weights.map(move |weight| (scales, weight))
    }) {
        if let Some(Found::Plain(tensor)) = found.get(weight)
            && tensor.dtype.is_float()
        {
            return Err(CheckpointError::Quantized {
                path: path.to_path_buf(),
                why: format!(
                    "tensor `{weight}` is {:?}, but has scales `{scales}`: if it was multiplied by \
                    them, write the model again without them and without `quantization_config`; if \
                    not, use the files that the model was published with",
                    tensor.dtype
                ),
            });
        }
    }
    Ok(())
}

/// The tensor of type `dtype` that FP8 codes and their scales stand for, or why they do not.
fn dequantized(
    codes: &Codes,
    (name, scales): (&str, &Found),
    scalings: &Scalings,
    dtype: DType,
) -> Result<HfTensor, String> {
    let (found, scales) = match scales {
        Found::Plain(tensor) if tensor.dtype.is_float() => {
            (tensor.shape.clone(), Scales::Floats(tensor.clone()))
        }
        Found::Codes(codes) if codes.format == Float8::E8m0 => {
            (codes.shape.clone(), Scales::Codes(codes.clone()))
        }
        Found::Plain(tensor) if scalings.are_bytes_e8m0 && tensor.dtype == DType::U8 => {
            let codes = Codes {
                format: Float8::E8m0,
                shape: tensor.shape.clone(),
                bytes: tensor.bytes.clone(),
                start: tensor.start,
            };
            (codes.shape.clone(), Scales::Codes(codes))
        }
        Found::Plain(HfTensor { dtype, .. }) => {
            return Err(format!(
                "its scales `{name}` are {dtype:?}, not floats; {USE_BF16}"
            ));
        }
        Found::Codes(codes) => {
            let format = codes.format.name();
            return Err(format!(
                "its scales `{name}` are {format}, not f32, bf16 or F8_E8M0; {USE_BF16}"
            ));
        }
        Found::Unreadable { dtype, .. } => {
            return Err(format!(
                "its scales `{name}` are {dtype}, not f32, bf16 or F8_E8M0; {USE_BF16}"
            ));
        }
    };
    let shape = &codes.shape;
    let ways = &scalings.ways;
    let fits = |scaling: &&Scaling| scaling.shapes(shape).contains(&found);
    let scaling = ways.iter().find(fits).ok_or_else(|| {
        let expected = ways.iter().flat_map(|scaling| scaling.shapes(shape));
        let mut expected: Vec<_> = expected.map(|shape| format!("{shape:?}")).collect();
        expected.dedup();
        format!(
            "its shape is {shape:?} and that of its scales `{name}` is {found:?}, but by config.json \
            they have {}; use the config.json and the files that the model was published with",
            expected.join(" or ")
        )
    })?;
    let grid = scaling.grid(shape);
    let bytes = DequantizedBytes::new(codes.clone(), scales, grid, dtype);
    let bytes = bytes
        .ok_or_else(|| format!("the model would be {dtype:?}, which is no float; {USE_BF16}"))?;
    Ok(HfTensor {
        dtype,
        shape: shape.clone(),
        bytes: Arc::new(bytes),
        start: 0,
    })
}

/// The element type of the model: that which `config.json` names, bf16 by default.
fn dtype_of(config: &Value) -> DType {
    let mut said = ["dtype", "torch_dtype"]
        .iter()
        .filter_map(|key| config[key].as_str());
    match said.next() {
        Some("float32") => DType::F32,
        Some("float16") => DType::F16,
        _ => DType::BF16,
    }
}

/// Leaves out the scales of activations, which a line names: megaburn computes these itself, if a run
/// quantises them at all.
fn leave_out_activations(path: &Path, found: &mut FoundTensors) {
    let is_left_out = |name: &str| {
        let last = name.rsplit('.').next().unwrap_or(name);
        OF_ACTIVATIONS.contains(&last)
    };
    let names = found.keys().filter(|name| is_left_out(name));
    let names: Vec<String> = names.cloned().collect();
    let Some(first) = names.first() else {
        return;
    };
    warn_once(format!(
        "{}: {} scales of activations, such as `{first}`, are not used",
        path.display(),
        names.len()
    ));
    for name in names {
        found.remove(&name);
    }
}
