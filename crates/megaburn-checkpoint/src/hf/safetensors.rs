//! The tensors of a safetensors file.

use std::path::Path;

use super::tensor::{HfTensor, Tensors};
use crate::{dtype, error::CheckpointError, safetensors_file::SafetensorsFile};

/// Opens a file and reads its header.
///
/// # Errors
/// The file cannot be read, is truncated, or has a tensor of a type that is not read.
pub(super) fn open(path: &Path) -> Result<Tensors, CheckpointError> {
    let file = SafetensorsFile::open(path)?;
    let tensor = |name: String| {
        let info = file.info(&name).expect("the file lists the tensor");
        let Some(dtype) = dtype::from_hf(info.dtype) else {
            let file = path.to_path_buf();
            let dtype = info.dtype.to_string();
            return Err(CheckpointError::UnreadableDtype { file, name, dtype });
        };
        let tensor = HfTensor {
            dtype,
            shape: info.shape.clone(),
            bytes: file.bytes(),
            start: file.stored(info).start,
        };
        Ok((name, tensor))
    };
    file.keys().into_iter().map(tensor).collect()
}
