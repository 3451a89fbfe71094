use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use burn::tensor::TensorData;
use safetensors::tensor::TensorInfo;
use serde::Deserialize;
use serde_json::Value;

use super::{CONFIG, INDEX, SINGLE};
use crate::{
    buffer::filled,
    dtype,
    error::{CheckpointError, IoContext},
    runs::Stored,
    safetensors_file::SafetensorsFile,
    source::{TensorHeader, TensorSource, nearest},
};

/// An opened folder of a published model: `config.json`, and either `model.safetensors` or the
/// files that `model.safetensors.index.json` names. If both exist, `model.safetensors` is used, as
/// in `transformers`.
///
/// Opening the folder opens the files and reads their headers. Tensor data is read only when
/// requested.
#[derive(Debug)]
pub struct HfDir {
    path: PathBuf,
    config: Value,
    files: Vec<SafetensorsFile>,
    /// The file of each tensor.
    index: BTreeMap<String, usize>,
}

/// Bytes of two tensors that are compared at once.
const BLOCK: usize = 1 << 20;

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl HfDir {
    /// Opens the folder `path`.
    ///
    /// # Errors
    /// The folder is missing; `config.json` is missing or invalid; there are no weights; the index
    /// is invalid, names a missing file, or names a file that lacks the tensor; a file is truncated
    /// or damaged; a tensor has an element type that megaburn does not read (8-bit floats).
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        fs::read_dir(path).during("read the folder", path)?;
        let config: Value = read_json(&path.join(CONFIG))?;
        if !config.is_object() {
            return Err(CheckpointError::damaged(
                &path.join(CONFIG),
                "it is not a JSON object",
            ));
        }
        let (files, index) = if path.join(SINGLE).exists() {
            let file = SafetensorsFile::open(&path.join(SINGLE))?;
            let index = file.keys().into_iter().map(|name| (name, 0)).collect();
            (vec![file], index)
        } else if path.join(INDEX).exists() {
            open_indexed(path)?
        } else {
            return Err(CheckpointError::NoWeights {
                path: path.to_path_buf(),
            });
        };
        let opened = Self {
            path: path.to_path_buf(),
            config,
            files,
            index,
        };
        for (name, &file) in &opened.index {
            let (file, info) = opened.info(file, name);
            if dtype::from_hf(info.dtype).is_none() {
                let file = file.path().to_path_buf();
                let name = name.clone();
                let dtype = info.dtype.to_string();
                return Err(CheckpointError::UnreadableDtype { file, name, dtype });
            }
        }
        Ok(opened)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The contents of `config.json`, an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// All tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorHeader> {
        self.index
            .iter()
            .map(|(name, &file)| self.header_in(file, name))
    }

    /// The header of a tensor, if there is one of this name.
    pub fn header(&self, name: &str) -> Option<TensorHeader> {
        self.index.get(name).map(|&file| self.header_in(file, name))
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
    pub(crate) fn find(
        &self,
        name: &str,
    ) -> Result<(&Path, TensorHeader, Stored<'_>), CheckpointError> {
        let Some(&index) = self.index.get(name) else {
            let path = self.path.clone();
            let name = name.to_string();
            let nearest = nearest(&name, self.index.keys());
            return Err(CheckpointError::MissingTensor {
                path,
                name,
                nearest,
            });
        };
        let (file, info) = self.info(index, name);
        Ok((file.path(), self.header_in(index, name), file.stored(info)))
    }

    fn header_in(&self, file: usize, name: &str) -> TensorHeader {
        let (_, info) = self.info(file, name);
        let dtype =
            dtype::from_hf(info.dtype).expect("the dtype was checked when the folder was opened");
        TensorHeader {
            name: name.to_string(),
            dtype,
            shape: info.shape.clone(),
        }
    }

    fn info(&self, file: usize, name: &str) -> (&SafetensorsFile, &TensorInfo) {
        let file = &self.files[file];
        (
            file,
            file.info(name)
                .expect("the index was checked when the folder was opened"),
        )
    }
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

type Opened = (Vec<SafetensorsFile>, BTreeMap<String, usize>);

fn open_indexed(folder: &Path) -> Result<Opened, CheckpointError> {
    let path = folder.join(INDEX);
    let Index { weight_map } = read_json(&path)?;
    let mut files: Vec<SafetensorsFile> = Vec::new();
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut index = BTreeMap::new();
    for (tensor, name) in weight_map {
        let number = match numbers.get(&name) {
            Some(number) => *number,
            None => {
                let refuse = |why| Err(CheckpointError::damaged(&path, why));
                if Path::new(&name).file_name() != Some(OsStr::new(&name)) {
                    return refuse(format!(
                        "it maps tensor `{tensor}` to `{name}`, which is not a file name"
                    ));
                }
                if !folder.join(&name).exists() {
                    let why = format!("it maps tensor `{tensor}` to `{name}`, which is missing");
                    return refuse(why);
                }
                files.push(SafetensorsFile::open(&folder.join(&name))?);
                numbers.insert(name.clone(), files.len() - 1);
                files.len() - 1
            }
        };
        if files[number].info(&tensor).is_none() {
            let near = nearest(&tensor, files[number].keys().iter());
            let why = format!(
                "it maps tensor `{tensor}` to `{name}`, which does not contain it; the nearest \
                name there is `{near}`"
            );
            return Err(CheckpointError::damaged(&path, why));
        }
        index.insert(tensor, number);
    }
    Ok((files, index))
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, CheckpointError> {
    let text = fs::read(path).during("read", path)?;
    serde_json::from_slice(&text).map_err(|e| CheckpointError::damaged(path, e.to_string()))
}
