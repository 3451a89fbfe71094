use std::path::Path;

use burn::tensor::TensorData;

use crate::{
    buffer::filled, dtype, error::CheckpointError, safetensors_file::SafetensorsFile,
    source::nearest,
};

/// A single safetensors file with any contents.
#[derive(Debug)]
pub struct TensorFile {
    file: SafetensorsFile,
}

impl TensorFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// The file cannot be read, is not a safetensors file, or is truncated.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Ok(Self {
            file: SafetensorsFile::open(path)?,
        })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.file.info(name).is_some()
    }

    /// The shape of a tensor, if there is one of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.file.info(name).map(|info| info.shape.as_slice())
    }

    /// Reads a full tensor.
    ///
    /// # Errors
    /// There is no such tensor (the error names the nearest), its type is not supported, or the
    /// file cannot be read.
    pub fn read(&self, name: &str) -> Result<TensorData, CheckpointError> {
        let path = self.file.path().to_path_buf();
        let name = name.to_string();
        let Some(info) = self.file.info(&name) else {
            let nearest = nearest(&name, self.file.keys().iter());
            return Err(CheckpointError::MissingTensor {
                path,
                name,
                nearest,
            });
        };
        let Some(dtype) = dtype::from_hf(info.dtype) else {
            let dtype = info.dtype.to_string();
            return Err(CheckpointError::UnreadableDtype {
                file: path,
                name,
                dtype,
            });
        };
        let stored = self.file.stored(info);
        filled(info.shape.clone(), dtype, |bytes| {
            stored.file.read_at(bytes, stored.start)
        })
    }
}
