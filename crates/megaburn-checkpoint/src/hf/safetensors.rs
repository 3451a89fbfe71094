//! The tensors of a safetensors file.

use std::path::Path;

use super::{
    quantized::{Codes, Float8, Found, FoundTensors},
    tensor::HfTensor,
};
use crate::{dtype, error::CheckpointError, safetensors_file::SafetensorsFile};

/// Opens a file and reads its header.
///
/// # Errors
/// The file cannot be read or is truncated.
pub(super) fn open(path: &Path) -> Result<FoundTensors, CheckpointError> {
    let file = SafetensorsFile::open(path)?;
    let tensor = |name: String| {
        let info = file.info(&name).expect("the file lists the tensor");
        let shape = info.shape.clone();
        let bytes = file.bytes();
        let found = match (
            dtype::from_hf(info.dtype),
            Float8::of_safetensors(info.dtype),
        ) {
            (Some(dtype), _) => Found::Plain(HfTensor {
                dtype,
                shape,
                bytes,
                start: file.stored(info).start,
            }),
            (None, Some(format)) => Found::Codes(Codes {
                format,
                shape,
                bytes,
                start: file.stored(info).start,
            }),
            (None, None) => Found::Unreadable {
                dtype: info.dtype.to_string(),
                bytes,
            },
        };
        (name, found)
    };
    Ok(file.keys().into_iter().map(tensor).collect())
}
