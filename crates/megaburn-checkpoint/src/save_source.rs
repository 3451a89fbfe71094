//! Writes the tensors of any source as a checkpoint.

use std::path::Path;

use burn::tensor::{DType, TensorData};
use megaburn_mesh::{Axis, ShardSpec};

use crate::{
    buffer::filled,
    cast,
    error::CheckpointError,
    named_tensor::NamedTensor,
    single::save_single,
    snapshot::Snapshot,
    source::{TensorHeader, TensorSource},
};

/// Bytes of a tensor that are read at once.
const BLOCK: usize = 16 << 20;

/// Writes the tensors of `source` as a checkpoint to exactly `path`, as [`save_single`] does. Each
/// is stored in the type that `dtype` returns for it, rounded once to nearest.
///
/// One tensor and a block of rows of about 16 MiB of it are in memory at a time.
///
/// # Errors
/// See [`save_single`]; also if the source cannot be read, or a tensor's type cannot be converted.
pub fn save_source(
    path: &Path,
    force: bool,
    snapshot: &Snapshot,
    source: &dyn TensorSource,
    dtype: impl Fn(&TensorHeader) -> DType,
    extra_files: &[(String, Vec<u8>)],
) -> Result<(), CheckpointError> {
    let headers = source.headers();
    let shards: Vec<_> = headers
        .iter()
        .map(|header| ShardSpec::whole(&header.shape, Axis::Tp, 0, 1))
        .collect();
    let tensors = headers.iter().zip(&shards).map(|(header, shard)| {
        let dtype = dtype(header);
        let name = header.name.clone();
        NamedTensor::lazy(name, shard, dtype, move || read_all(source, header, dtype))
    });
    save_single(path, force, snapshot, "tp1", tensors, extra_files)
}

/// Reads a full tensor as `dtype`, block by block.
fn read_all(
    source: &dyn TensorSource,
    header: &TensorHeader,
    dtype: DType,
) -> Result<TensorData, CheckpointError> {
    let Some(copy) = cast::copy(header.dtype, dtype) else {
        return Err(CheckpointError::Dtype {
            path: source.label().into(),
            name: header.name.clone(),
            expected: format!("{dtype:?}"),
            found: format!("{:?}", header.dtype),
        });
    };
    let row = header.row_len() * dtype.size();
    filled(header.shape.clone(), dtype, |bytes| {
        for rows in header.blocks(BLOCK) {
            let to = &mut bytes[rows.start * row..rows.end * row];
            copy(source.read_rows(&header.name, rows)?.as_bytes(), to);
        }
        Ok(())
    })
}
