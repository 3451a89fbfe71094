//! Writes the file of a rank.

mod background_sync;
mod budget;
mod data_file;
mod file_hasher;
mod finite;
mod header;
mod pipeline;
mod planned_tensor;
#[cfg(test)]
mod tests;

use std::{cmp::Reverse, ops::Range, path::Path, sync::atomic::AtomicBool};

use burn::tensor::TensorData;
use megaburn_collective::Progress;

use crate::{error::CheckpointError, hex::hex, manifest::FileInfo, paths::sync_dir};
use budget::Budget;
use file_hasher::FileHasher;
pub(crate) use {
    data_file::DataFile,
    header::Header,
    planned_tensor::{PlannedTensor, TensorPlan},
};

/// Bytes of tensors that may be in memory at once while they are written, if none is larger.
const MEMORY: usize = 256 << 20;

/// Writes `tensors` to `folder/name` and syncs the file. If there are none, no file is written. The
/// hash covers the bytes that are written, not those that the disk returns later. `read` is called
/// for one tensor at a time on this thread, while two others hash and write the tensors before it.
///
/// # Errors
/// `is_cancelled` was set, values cannot be read, or the file cannot be written.
pub(crate) fn write_rank_file<V>(
    folder: &Path,
    name: &str,
    mut tensors: Vec<PlannedTensor<V>>,
    read: impl Fn(V, Range<usize>) -> Result<TensorData, CheckpointError>,
    progress: &Progress,
    is_cancelled: &AtomicBool,
) -> Result<Option<FileInfo>, CheckpointError> {
    if tensors.is_empty() {
        return Ok(None);
    }
    // Wide elements first, so that every piece is aligned, as some readers of the format prefer.
    tensors.sort_by_cached_key(|PlannedTensor { plan, .. }| {
        (Reverse(plan.dtype.size()), plan.name.clone())
    });
    let mut pieces = Vec::new();
    let mut header = Header::default();
    for PlannedTensor { plan, .. } in &tensors {
        for written in &plan.pieces {
            let piece = plan.piece_info(written);
            let shape = piece.stored_shape(&plan.info());
            header.push(piece.key.clone(), plan.file_dtype, shape);
            pieces.push(piece);
        }
    }
    let path = folder.join(name);
    progress.expect(header.num_data_bytes());
    let header = header.into_bytes(&path, None)?;
    let file = DataFile::create(&path, &header)?;
    let file = file.with_progress(progress).cancelled_by(is_cancelled);
    let read = |values, plan: &TensorPlan| read(values, plan.range.clone());
    let (hasher, file) = pipeline::run(
        tensors,
        read,
        &Budget::new(MEMORY),
        FileHasher::new(&header),
        file,
    )?;
    let bytes = file.finish()?;
    let (hash, chunks) = hasher.finish();
    for (piece, chunks) in pieces.iter_mut().zip(chunks) {
        piece.chunks = chunks;
    }
    sync_dir(folder)?;
    Ok(Some(FileInfo {
        name: name.to_string(),
        bytes,
        xxh3: hex(hash),
        pieces,
    }))
}
