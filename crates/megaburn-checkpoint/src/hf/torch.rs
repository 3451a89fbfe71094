//! The tensors of a file of `torch.save`.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use megaburn_torch::pt::{ContiguousBytes, PtFile, StoredTensor};

use super::{
    quantized::{Codes, Float8, Found, FoundTensors},
    tensor::HfTensor,
};
use crate::{dtype, error::CheckpointError, tensor_bytes::TensorBytes};

/// Opens a file and reads its pickle, of which nothing is executed.
///
/// # Errors
/// The file cannot be read, is damaged, or is more than a state dict.
pub(super) fn open(path: &Path) -> Result<FoundTensors, CheckpointError> {
    let file = Arc::new(PtFile::open(path)?);
    let arranged = Arc::new(Arranged::default());
    let mut tensors = FoundTensors::new();
    for (name, stored) in file.weights()? {
        let found = stored.dtype();
        let shape = stored.shape().to_vec();
        let bytes: Arc<dyn TensorBytes> = match file.contiguous(&stored)? {
            Some(bytes) => Arc::new(Contiguous {
                path: path.to_path_buf(),
                bytes,
            }),
            None => Arc::new(Strided {
                path: path.to_path_buf(),
                file: file.clone(),
                stored,
                arranged: arranged.clone(),
            }),
        };
        let start = 0;
        let found = match (dtype::from_torch(found), Float8::of_torch(found)) {
            (Some(dtype), _) => Found::Plain(HfTensor {
                dtype,
                shape,
                bytes,
                start,
            }),
            (None, Some(format)) => Found::Codes(Codes {
                format,
                shape,
                bytes,
                start,
            }),
            (None, None) => Found::Unreadable {
                dtype: found.to_string(),
                bytes,
            },
        };
        tensors.insert(name, found);
    }
    Ok(tensors)
}

/// A tensor whose bytes are one range of the file.
#[derive(Debug)]
struct Contiguous {
    path: PathBuf,
    bytes: ContiguousBytes,
}

impl TensorBytes for Contiguous {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        Ok(self.bytes.read_at(buffer, at)?)
    }
}

/// The strided tensor of a file that was read last, in row-major order. A tensor is read block by
/// block, and each block of a transposed one has elements from all over the storage.
#[derive(Debug, Default)]
struct Arranged(Mutex<Option<(StoredTensor, Vec<u8>)>>);

/// A tensor that is a view of a storage: transposed, for example. All of it is read at once.
#[derive(Debug)]
struct Strided {
    path: PathBuf,
    file: Arc<PtFile>,
    stored: StoredTensor,
    arranged: Arc<Arranged>,
}

impl TensorBytes for Strided {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let mut arranged = self
            .arranged
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if arranged.as_ref().is_none_or(|(of, _)| *of != self.stored) {
            // The memory of the other tensor is free before this one is read.
            *arranged = None;
            *arranged = Some((self.stored.clone(), self.file.read(&self.stored)?));
        }
        let (_, bytes) = arranged.as_ref().expect("the tensor was just read");
        let part = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
        let part = part.and_then(|part| part.get(..buffer.len()));
        let part = part.ok_or_else(|| {
            let why = format!(
                "bytes from {at} on are needed of a tensor of {}",
                bytes.len()
            );
            CheckpointError::damaged(&self.path, why)
        })?;
        buffer.copy_from_slice(part);
        Ok(())
    }
}
