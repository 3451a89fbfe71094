//! Hugging Face checkpoints: where each parameter stands in one, and reading it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{DType, TensorData};
use megaburn_mesh::ShardSpec;
use safetensors::{Dtype, SafeTensors};

use crate::ModelError;

/// How a parameter is made of the tensors of a Hugging Face checkpoint: one or more, as they are or
/// transposed, side by side along the last dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfSource {
    /// The tensors' names, in order.
    pub names: Vec<String>,
    /// Whether they are stored transposed (Hugging Face keeps linear weights `[out, in]`).
    pub transposed: bool,
}

impl HfSource {
    /// One tensor as it is.
    pub fn plain(name: impl Into<String>) -> Self {
        Self { names: vec![name.into()], transposed: false }
    }

    /// Linear weights side by side: `[in, out_1 | out_2 | ..]`.
    pub fn columns(names: impl IntoIterator<Item = String>) -> Self {
        Self { names: names.into_iter().collect(), transposed: true }
    }
}

/// A model family that Hugging Face knows too.
pub trait HfKeys {
    /// Where the parameter at `path` stands; `None` if the family has no such parameter.
    fn hf_source(path: &str) -> Option<HfSource>;
}

/// A safetensors file of f32 tensors in memory.
#[derive(Debug)]
pub struct HfTensors {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl HfTensors {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no safetensors file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let fail = |why: String| ModelError::File { path: path.to_path_buf(), why };
        let bytes = fs::read(path).map_err(|error| fail(error.to_string()))?;
        SafeTensors::deserialize(&bytes).map_err(|error| fail(error.to_string()))?;
        Ok(Self { path: path.to_path_buf(), bytes })
    }

    /// The tensor `prefix + name`.
    ///
    /// # Errors
    /// There is none, or it is neither f32 nor i64.
    pub fn tensor(&self, name: &str) -> Result<TensorData, ModelError> {
        let fail = |why: String| {
            let (path, name) = (self.path.clone(), name.to_string());
            ModelError::Tensor { path, name, why }
        };
        let tensors = SafeTensors::deserialize(&self.bytes).expect("it was read once");
        let view = tensors.tensor(name).map_err(|error| fail(error.to_string()))?;
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::I64 => DType::I64,
            other => return Err(fail(format!("is {other:?}, expected F32 or I64"))),
        };
        Ok(TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), dtype))
    }

    /// The whole parameter made from `source`, each name with `prefix` in front.
    ///
    /// # Errors
    /// See [`tensor`](Self::tensor); also tensors that do not stand side by side.
    pub fn parameter(&self, source: &HfSource, prefix: &str) -> Result<TensorData, ModelError> {
        let read = |name: &String| {
            let tensor = self.tensor(&format!("{prefix}{name}"))?;
            if !source.transposed {
                return Ok(tensor);
            }
            transpose(&tensor).ok_or_else(|| ModelError::Tensor {
                path: self.path.clone(),
                name: name.clone(),
                why: format!(
                    "is {:?} {:?}, expected a matrix of F32",
                    tensor.dtype(),
                    tensor.shape()
                ),
            })
        };
        let tensors = source.names.iter().map(read).collect::<Result<Vec<_>, ModelError>>()?;
        match <[TensorData; 1]>::try_from(tensors) {
            Ok([tensor]) => Ok(tensor),
            Err(tensors) => side_by_side(&tensors).ok_or_else(|| ModelError::Tensor {
                path: self.path.clone(),
                name: source.names.join(" | "),
                why: "do not have the same number of input features".into(),
            }),
        }
    }

    /// This rank's shard of a parameter.
    ///
    /// # Errors
    /// As [`parameter`](Self::parameter); also another shape than the model's.
    pub fn shard(
        &self,
        source: &HfSource,
        prefix: &str,
        spec: &ShardSpec,
    ) -> Result<TensorData, ModelError> {
        let whole = self.parameter(source, prefix)?;
        if whole.shape().as_slice() != spec.global_shape {
            let why = format!("expected {:?}, found {:?}", spec.global_shape, whole.shape());
            let name = source.names.join(" | ");
            return Err(ModelError::Tensor { path: self.path.clone(), name, why });
        }
        Ok(cut(&whole, spec))
    }
}

/// The local tensor of a rank out of the whole one; padding is zero.
pub fn cut(whole: &TensorData, spec: &ShardSpec) -> TensorData {
    let (shape, size) = (spec.local_shape(), whole.dtype().size());
    let mut local = vec![0; shape.iter().product::<usize>() * size];
    for piece in &spec.pieces {
        spec.for_each_run(piece, |to, from, len| {
            local[to * size..(to + len) * size]
                .copy_from_slice(&whole.bytes()[from * size..(from + len) * size]);
        });
    }
    TensorData::from_bytes_vec(local, shape, whole.dtype())
}

fn transpose(tensor: &TensorData) -> Option<TensorData> {
    let [rows, columns] = tensor.shape().to_vec().try_into().ok()?;
    let values = tensor.try_to_vec::<f32>().ok()?;
    let out = (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
    Some(TensorData::new::<f32, _>(out, [columns, rows]))
}

fn side_by_side(tensors: &[TensorData]) -> Option<TensorData> {
    let rows = tensors.first()?.shape()[0];
    if tensors.iter().any(|tensor| tensor.shape().num_dims() != 2 || tensor.shape()[0] != rows) {
        return None;
    }
    let columns = tensors.iter().map(|tensor| tensor.shape()[1]).sum::<usize>();
    let mut out = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for tensor in tensors {
            let width = tensor.shape()[1];
            let values = tensor.try_to_vec::<f32>().ok()?;
            out.extend_from_slice(&values[row * width..(row + 1) * width]);
        }
    }
    Some(TensorData::new::<f32, _>(out, [rows, columns]))
}
