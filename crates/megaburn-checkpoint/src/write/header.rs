//! The header of a safetensors file.

use std::{collections::HashMap, io, path::Path};

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use crate::{
    dtype,
    error::{CheckpointError, IoContext},
};

/// The tensors of a safetensors file, in file order.
#[derive(Debug, Default)]
pub(crate) struct Header {
    entries: Vec<(String, TensorInfo)>,
    end: usize,
}

impl Header {
    pub(crate) fn push(&mut self, key: String, dtype: Dtype, shape: Vec<usize>) {
        let start = self.end;
        self.end += shape.iter().product::<usize>() * dtype::size(dtype);
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets: (start, self.end),
        };
        self.entries.push((key, info));
    }

    /// Bytes of all tensors.
    pub(crate) fn num_data_bytes(&self) -> u64 {
        self.end as u64
    }

    /// Returns the bytes of the file at `path` that come before the tensors.
    pub(crate) fn into_bytes(
        self,
        path: &Path,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let encode = || {
            let metadata = Metadata::new(metadata, self.entries).map_err(io::Error::other)?;
            let mut text = serde_json::to_vec(&metadata)?;
            // The format requires the data to start at a multiple of 8 bytes.
            text.resize(text.len().next_multiple_of(8), b' ');
            let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
            bytes.append(&mut text);
            Ok(bytes)
        };
        encode().during("write", path)
    }
}
