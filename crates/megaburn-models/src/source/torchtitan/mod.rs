//! Checkpoints of torchtitan's Llama 3, in the format of `torch.distributed.checkpoint`, as models.
//!
//! Names and orders of the tensors are those of torchtitan's `models/llama3` (versions 0.1 to 0.3)
//! and of its `Llama3StateDictAdapter`.

mod config;
mod names;
mod tensor;
#[cfg(test)]
mod tests;

use std::{path::Path, sync::Arc};

use megaburn_checkpoint::{CheckpointError, HfDir, HfTensor, retried};
use megaburn_torch::dcp::DcpDir;

use crate::{error::ModelError, warn_once::warn_once};
use names::Names;
use tensor::{Rows, TitanTensor, dtype};

/// The file by which a folder of `torch.distributed.checkpoint` is known.
pub(super) const METADATA: &str = ".metadata";

/// Opens a folder that torchtitan saved, with the names, the order of rows and the `config.json`
/// that the model would have on Hugging Face. A line says what else the folder has.
///
/// # Errors
/// The folder cannot be read, has tensors that Llama 3 does not have, or its `config.json` lacks
/// what the tensors do not tell, or contradicts them.
pub(super) fn open(path: &Path) -> Result<HfDir, ModelError> {
    let opened = retried(|| DcpDir::open(path).map_err(CheckpointError::from))?;
    let dir = Arc::new(opened);
    let Names { tensors, ignored } = Names::of(&dir)?;
    let (json, sizes) = config::complete(path, &dir, &tensors)?;
    let mut opened = Vec::new();
    for (name, of_titan) in tensors {
        let stored = dir.tensor(&of_titan).map_err(CheckpointError::from)?;
        let fail = |why: String| ModelError::Tensor {
            path: path.to_path_buf(),
            name: of_titan.clone(),
            why,
        };
        let shape = stored.shape().to_vec();
        let is_rotated = ["q_proj", "k_proj"].iter().any(|part| name.contains(part));
        let rows = if is_rotated {
            Rows::Halves {
                head_dim: sizes.head_dim,
            }
        } else {
            Rows::Same
        };
        let item = stored.dtype();
        let dtype = dtype(item).ok_or_else(|| fail(format!("expected floats, found {item}")))?;
        if shape.is_empty() || shape.len() > 2 {
            return Err(fail(format!(
                "expected a matrix or a vector, found {shape:?}"
            )));
        }
        let bytes = TitanTensor::new(dir.clone(), of_titan.clone(), &shape, dtype.size(), rows);
        let bytes = bytes.ok_or_else(|| {
            let head_dim = sizes.head_dim;
            fail(format!(
                "expected rows of heads of {head_dim}, found {shape:?}"
            ))
        })?;
        let tensor = HfTensor {
            dtype,
            shape,
            bytes: Arc::new(bytes),
            start: 0,
        };
        opened.push((name, tensor));
    }
    if !ignored.is_empty() {
        warn_once(format!(
            "{}: only the weights of the checkpoint of torchtitan are read, and not {}",
            path.display(),
            ignored.join(", ")
        ));
    }
    Ok(HfDir::from_tensors(path, json, opened)?)
}
