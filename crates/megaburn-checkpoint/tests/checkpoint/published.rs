//! Published models for tests: arbitrary tensors, written by the safetensors library itself.

use std::{collections::HashMap, fs, path::Path};

use burn::tensor::{BoolStore, DType, TensorData, bf16, f16};
use megaburn_mesh::ShardSpec;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

use crate::model::Random;

pub(crate) struct Stored {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    /// Random values of both signs and many magnitudes; random bits for integers.
    pub(crate) fn random(name: &str, dtype: DType, shape: &[usize], random: &mut Random) -> Self {
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product() {
            let bits = random.next();
            let value = (bits as i64 as f64) / 2f64.powi(63) * 2f64.powi((bits % 13) as i32 - 6);
            match dtype {
                DType::F64 => bytes.extend(value.to_le_bytes()),
                DType::F32 => bytes.extend((value as f32).to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f64(value).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(value).to_le_bytes()),
                DType::Bool(_) => bytes.push((bits % 2) as u8),
                other => bytes.extend(&bits.to_le_bytes()[..other.size()]),
            }
        }
        Self {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }
}

pub(crate) fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::Bool(BoolStore::Native) => Dtype::BOOL,
        other => panic!("no test has {other:?}"),
    }
}

/// A file as the safetensors library writes it for `transformers`.
pub(crate) fn serialized(tensors: &[Stored]) -> Vec<u8> {
    let views = tensors.iter().map(|t| {
        let view = TensorView::new(file_dtype(t.dtype), t.shape.clone(), &t.bytes).unwrap();
        (t.name.clone(), view)
    });
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize(views, Some(metadata)).unwrap()
}

/// Writes a folder with a single weight file.
pub(crate) fn publish(dir: &Path, tensors: &[Stored]) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), r#"{"model_type": "test"}"#).unwrap();
    fs::write(dir.join("model.safetensors"), serialized(tensors)).unwrap();
}

/// Writes a folder with several weight files and an index; tensors are distributed round robin.
pub(crate) fn publish_sharded(dir: &Path, tensors: Vec<Stored>, files: usize) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), r#"{"model_type": "test"}"#).unwrap();
    let mut dealt: Vec<Vec<Stored>> = (0..files).map(|_| Vec::new()).collect();
    let mut weight_map = HashMap::new();
    for (number, tensor) in tensors.into_iter().enumerate() {
        let file = number % files;
        weight_map.insert(tensor.name.clone(), format!("part-{file}.safetensors"));
        dealt[file].push(tensor);
    }
    for (file, tensors) in dealt.iter().enumerate() {
        fs::write(
            dir.join(format!("part-{file}.safetensors")),
            serialized(tensors),
        )
        .unwrap();
    }
    let index = json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// The full parameter that `parts` make up, element by element: they are concatenated along the
/// last dimension of `shape`, and each has its last two dimensions swapped if `transposed`.
pub(crate) fn assembled(parts: &[&Stored], transposed: bool, shape: &[usize]) -> Vec<u8> {
    let size = parts[0].dtype.size();
    let mut whole = Vec::new();
    for element in 0..shape.iter().product() {
        let mut at = vec![0; shape.len()];
        let mut rest: usize = element;
        for dim in (0..shape.len()).rev() {
            at[dim] = rest % shape[dim];
            rest /= shape[dim];
        }
        let turned = transposed && shape.len() >= 2;
        let mut part = 0;
        if let Some(last) = at.len().checked_sub(1) {
            let len = |part: &Stored| part.shape[if turned { last - 1 } else { last }];
            while at[last] >= len(parts[part]) {
                at[last] -= len(parts[part]);
                part += 1;
            }
            if turned {
                at.swap(last - 1, last);
            }
        }
        let dims = at.iter().zip(&parts[part].shape);
        let offset = dims.fold(0, |offset, (&at, &len)| offset * len + at);
        whole.extend(&parts[part].bytes[offset * size..(offset + 1) * size]);
    }
    whole
}

/// A rank's part of a full parameter; padding is zero.
pub(crate) fn cut(whole: &[u8], spec: &ShardSpec, dtype: DType) -> TensorData {
    let size = dtype.size();
    let mut local = vec![0; spec.local_shape().iter().product::<usize>() * size];
    for piece in &spec.pieces {
        spec.for_each_run(piece, |l, g, n| {
            local[l * size..(l + n) * size].copy_from_slice(&whole[g * size..(g + n) * size]);
        });
    }
    TensorData::from_bytes_vec(local, spec.local_shape(), dtype)
}
