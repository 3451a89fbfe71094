use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use burn::tensor::TensorData;
use serde_json::Value;

use super::{
    CONFIG,
    json::read_json,
    quantized::{Readable, readable, with_method_of_file},
    tensor::{HfTensor, Tensors},
    weights,
};
use crate::{
    buffer::filled,
    error::{CheckpointError, IoContext},
    runs::Stored,
    sizes::num_elements,
    source::{TensorHeader, TensorSource, nearest},
};

/// An opened folder of a published model: `config.json` and its weights, in the first of these forms
/// that the folder has:
///
/// 1. `model.safetensors`
/// 2. the files that `model.safetensors.index.json` names
/// 3. `pytorch_model.bin`, a state dict that `torch.save` wrote
/// 4. the files that `pytorch_model.bin.index.json` names
/// 5. the only file `*.pt` or `*.pth`, not counting files of a trainer (`optimizer.pt`, ...)
///
/// Weights in FP8 become floats as they are read: each code times its scale, in f32, rounded to the
/// type that is asked for. By themselves they have the type of the model in `config.json`, bf16 if
/// it names none. Their scales are no tensors of the folder.
///
/// Opening the folder opens the files and reads their headers or pickles; nothing of a pickle is
/// executed. Tensor data is read only when requested, and only the bytes that are needed. A tensor
/// of PyTorch that is not contiguous is read as a whole, and the last one is kept.
#[derive(Debug)]
pub struct HfDir {
    path: PathBuf,
    config: Value,
    tensors: Tensors,
    /// Tensors that are made from FP8, in f32: `tensors` has them in the type of `config.json`.
    wide: Tensors,
}

/// Bytes of two tensors that are compared at once.
const BLOCK: usize = 1 << 20;

impl HfDir {
    /// Opens the folder `path`.
    ///
    /// # Errors
    /// The folder is missing; `config.json` is missing or invalid; there are no weights, or several
    /// `.pt` files; the index is invalid, names a missing file, or names a file that lacks the
    /// tensor; a file is truncated or damaged; a pickle names anything that is no part of a state
    /// dict; weights are quantised by a method that is not read; an FP8 tensor has no scales, or
    /// they have another shape; a tensor has an element type that megaburn does not read.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        fs::read_dir(path).during("read the folder", path)?;
        let config: Value = read_json(&path.join(CONFIG))?;
        if !config.is_object() {
            return Err(CheckpointError::damaged(
                &path.join(CONFIG),
                "it is not a JSON object",
            ));
        }
        let config = with_method_of_file(config, path)?;
        let found = weights::open(path)?;
        let Readable { tensors, wide } = readable(path, &config, found)?;
        Ok(Self {
            wide,
            ..Self::from_tensors(path, config, tensors)?
        })
    }

    /// The tensors of a folder of another format, under the names that they would have if the
    /// model had been published, and its `config.json`.
    ///
    /// # Errors
    /// The shape of a tensor is so large that its bytes cannot be counted.
    pub fn from_tensors(
        path: &Path,
        config: Value,
        tensors: impl IntoIterator<Item = (String, HfTensor)>,
    ) -> Result<Self, CheckpointError> {
        let tensors: Tensors = tensors.into_iter().collect();
        for (name, HfTensor { shape, bytes, .. }) in &tensors {
            if num_elements(shape).is_none() {
                let why = format!("the shape of tensor `{name}`, {shape:?}, is too large");
                return Err(CheckpointError::damaged(bytes.path(), why));
            }
        }
        Ok(Self {
            path: path.to_path_buf(),
            config,
            tensors,
            wide: Tensors::new(),
        })
    }

    /// The same tensors under other names, for folders with the names of earlier versions of
    /// Transformers.
    #[must_use]
    pub fn renamed(self, rename: impl Fn(String) -> String) -> Self {
        let renamed = |tensors: Tensors| {
            let tensors = tensors.into_iter();
            tensors
                .map(|(name, tensor)| (rename(name), tensor))
                .collect()
        };
        Self {
            tensors: renamed(self.tensors),
            wide: renamed(self.wide),
            ..self
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The contents of `config.json`, an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// Whether some weights are stored in FP8.
    pub fn has_fp8(&self) -> bool {
        !self.wide.is_empty()
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorHeader> {
        self.tensors
            .iter()
            .map(|(name, tensor)| tensor.header(name))
    }

    /// The header of a tensor, if there is one of this name. `name[3]` is row 3 of `name` without
    /// its first dimension: an expert's matrix in a stack of them.
    pub fn header(&self, name: &str) -> Option<TensorHeader> {
        row_or_tensor(&self.tensors, name).map(|(_, header, _)| header)
    }

    /// Whether two tensors have the same element type, shape and bytes.
    ///
    /// # Errors
    /// One of them does not exist (the error names the nearest) or cannot be read.
    pub fn are_equal(&self, a: &str, b: &str) -> Result<bool, CheckpointError> {
        let (_, header_a, stored_a) = self.find(a)?;
        let (_, header_b, stored_b) = self.find(b)?;
        if (header_a.dtype, &header_a.shape) != (header_b.dtype, &header_b.shape) {
            return Ok(false);
        }
        let mut buffers = [vec![0; BLOCK], vec![0; BLOCK]];
        for at in (0..stored_a.len).step_by(BLOCK) {
            let len = (stored_a.len - at).min(BLOCK as u64) as usize;
            let [of_a, of_b] = &mut buffers;
            for (stored, buffer) in [(stored_a, &mut *of_a), (stored_b, &mut *of_b)] {
                stored.file.read_at(&mut buffer[..len], stored.start + at)?;
            }
            if of_a[..len] != of_b[..len] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The header of a tensor that must exist.
    ///
    /// # Errors
    /// There is no such tensor (the error names the nearest).
    pub fn require(&self, name: &str) -> Result<TensorHeader, CheckpointError> {
        self.find(name).map(|(_, header, _)| header)
    }

    /// The file, header and stored bytes of a tensor.
    pub(crate) fn find(&self, name: &str) -> Result<FoundTensor<'_>, CheckpointError> {
        row_or_tensor(&self.tensors, name).ok_or_else(|| {
            let path = self.path.clone();
            let name = name.to_string();
            let nearest = nearest(&name, self.tensors.keys());
            CheckpointError::MissingTensor {
                path,
                name,
                nearest,
            }
        })
    }

    /// Like [`find`](Self::find), for a tensor that is then cast to another type: one that is made
    /// from FP8 is rounded only once.
    pub(super) fn find_to_cast(&self, name: &str) -> Result<FoundTensor<'_>, CheckpointError> {
        row_or_tensor(&self.wide, name).map_or_else(|| self.find(name), Ok)
    }
}

/// The file, header and stored bytes of a tensor.
type FoundTensor<'a> = (&'a Path, TensorHeader, Stored<'a>);

/// The tensor of a name, or the row of a stack that it names.
fn row_or_tensor<'a>(tensors: &'a Tensors, name: &str) -> Option<FoundTensor<'a>> {
    if let Some(tensor) = tensors.get(name) {
        return Some((tensor.path(), tensor.header(name), tensor.stored()));
    }
    let (stack, row) = stacked_row(name)?;
    tensors.get(stack)?.row(name, row)
}

impl TensorSource for HfDir {
    fn label(&self) -> String {
        self.path.display().to_string()
    }

    fn headers(&self) -> Vec<TensorHeader> {
        self.tensors().collect()
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<TensorData, CheckpointError> {
        let (_, header, stored) = self.find(name)?;
        assert!(
            rows.start <= rows.end && rows.end <= header.num_rows(),
            "rows {rows:?} are out of range"
        );
        let start = stored.start + (rows.start * header.row_len() * header.dtype.size()) as u64;
        let shape = header.rows_shape(&rows);
        filled(shape, header.dtype, |rows| stored.file.read_at(rows, start))
    }
}

/// The name of a stack and the number of a row, of a name such as `stack[3]`.
pub fn stacked_row(name: &str) -> Option<(&str, usize)> {
    let (stack, row) = name.strip_suffix(']')?.rsplit_once('[')?;
    Some((stack, row.parse().ok()?))
}
