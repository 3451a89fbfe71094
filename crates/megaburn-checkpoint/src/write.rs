use std::{
    cmp::Reverse,
    collections::HashMap,
    fs::File,
    io::{self, BufWriter, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use megaburn_mesh::ShardSpec;
use safetensors::{Dtype, tensor::Metadata};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    chunks::ChunkHasher,
    dtype,
    error::{CheckpointError, IoContext},
    hex::hex,
    manifest::{FileInfo, PieceInfo, TensorInfo, at_least_1d},
    paths::sync_dir,
    piece_index::PieceIndex,
    write_plan::WrittenPiece,
};

/// Values of a tensor that this rank writes.
pub(crate) struct PlannedTensor<V> {
    pub(crate) name: String,
    pub(crate) shard: ShardSpec,
    pub(crate) dtype: DType,
    pub(crate) file_dtype: Dtype,
    /// At least one.
    pub(crate) pieces: Vec<WrittenPiece>,
    /// The range of the flattened local tensor that `values` returns.
    pub(crate) range: Range<usize>,
    pub(crate) values: V,
}

/// Writes `tensors` to `folder/name` and syncs the file. If there are none, no file is written. The
/// hash covers the bytes that are written, not those that the disk returns later. `read` is called
/// for one tensor at a time, and its values are dropped before the next.
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
    tensors.sort_by_cached_key(|tensor| (Reverse(tensor.dtype.size()), tensor.name.clone()));
    let mut pieces = Vec::new();
    let mut header = Header::default();
    for tensor in &tensors {
        for written in &tensor.pieces {
            let piece = piece_info(tensor, written);
            let info = TensorInfo {
                dtype: tensor.file_dtype,
                global_shape: tensor.shard.global_shape.clone(),
            };
            let shape = piece.stored_shape(&info);
            header.push(piece.key.clone(), tensor.file_dtype, shape);
            pieces.push(piece);
        }
    }
    let path = folder.join(name);
    progress.expect(header.end as u64);
    let file = DataFile::create(&path, header, None)?;
    let mut file = file.with_progress(progress).cancelled_by(is_cancelled);
    let mut chunks = Vec::new();
    for tensor in tensors {
        file.check()?;
        chunks.extend(write_tensor(&mut file, tensor, &read)?);
    }
    for (piece, chunks) in pieces.iter_mut().zip(chunks) {
        piece.chunks = chunks;
    }
    let (bytes, hash) = file.finish()?;
    sync_dir(folder)?;
    Ok(Some(FileInfo {
        name: name.to_string(),
        bytes,
        xxh3: hex(hash),
        pieces,
    }))
}

/// Describes a piece that is written. Its key is the tensor's name, `#` and the start of its slice,
/// `@` and its first element, where it is not the full tensor or slice.
fn piece_info<V>(tensor: &PlannedTensor<V>, written: &WrittenPiece) -> PieceInfo {
    let PlannedTensor { name, shard, .. } = tensor;
    let range = shard.pieces[written.piece].global.clone();
    let is_whole = range.len() == at_least_1d(&shard.global_shape)[shard.dim];
    let mut key = name.clone();
    if !is_whole {
        key += &format!("#{}", range.start);
    }
    if !written.is_full {
        key += &format!("@{}", written.range.start);
    }
    PieceInfo {
        tensor: name.clone(),
        key,
        dim: shard.dim,
        range,
        elements: (!written.is_full).then(|| written.range.clone()),
        chunks: Vec::new(),
    }
}

/// Writes the pieces of a tensor. Returns the chunk hashes of each.
fn write_tensor<V>(
    file: &mut DataFile<'_>,
    tensor: PlannedTensor<V>,
    read: impl Fn(V, Range<usize>) -> Result<TensorData, CheckpointError>,
) -> Result<Vec<Vec<String>>, CheckpointError> {
    let PlannedTensor {
        name,
        shard,
        dtype,
        range,
        pieces,
        values,
        ..
    } = tensor;
    let data = read(values, range.clone())?;
    if data.dtype() != dtype {
        let why = format!("it is {:?}, but {dtype:?} was expected", data.dtype());
        return Err(CheckpointError::Source { name, why });
    }
    let found = data.num_elements();
    let expected = range.len();
    if found != expected {
        return Err(CheckpointError::LocalShape {
            name,
            found,
            expected,
        });
    }
    let bytes = data.as_bytes();
    let size = dtype.size();
    let mut chunks = Vec::new();
    for written in pieces {
        let mut hasher = ChunkHasher::new();
        let mut result = Ok(());
        let index = PieceIndex::new(&shard, &shard.pieces[written.piece]);
        index.for_each_run(written.range, |local, len| {
            if result.is_ok() {
                let run = &bytes[(local - range.start) * size..][..len * size];
                hasher.update(run);
                result = file.write(run);
            }
        });
        result?;
        chunks.push(hasher.finish());
    }
    Ok(chunks)
}

/// The tensors of a safetensors file, in file order.
#[derive(Debug, Default)]
pub(crate) struct Header {
    entries: Vec<(String, safetensors::tensor::TensorInfo)>,
    end: usize,
}

impl Header {
    pub(crate) fn push(&mut self, key: String, dtype: Dtype, shape: Vec<usize>) {
        let start = self.end;
        self.end += shape.iter().product::<usize>() * dtype::size(dtype);
        self.entries.push((
            key,
            safetensors::tensor::TensorInfo {
                dtype,
                shape,
                data_offsets: (start, self.end),
            },
        ));
    }
}

/// A safetensors file that is being written.
pub(crate) struct DataFile<'a> {
    path: PathBuf,
    file: Hashing<BufWriter<File>>,
    progress: Progress,
    is_cancelled: Option<&'a AtomicBool>,
    /// Bytes since the last progress report, and since the last sync.
    unreported: usize,
    unsynced: usize,
}

/// Bytes per progress report.
const STEP: usize = 16 << 20;
/// Bytes per sync. Otherwise a host with much memory would cache all of a large file, and the sync
/// at the end would report no progress for as long as the disk needs.
const SYNC: usize = 1 << 30;

impl<'a> DataFile<'a> {
    pub(crate) fn create(
        path: &Path,
        header: Header,
        metadata: Option<HashMap<String, String>>,
    ) -> Result<Self, CheckpointError> {
        let create = || {
            let metadata = Metadata::new(metadata, header.entries).map_err(io::Error::other)?;
            let mut text = serde_json::to_vec(&metadata)?;
            // The format requires the data to start at a multiple of 8 bytes.
            text.resize(text.len().next_multiple_of(8), b' ');
            let file = BufWriter::new(File::create(path)?);
            let mut file = Hashing {
                file,
                hash: Xxh3::new(),
                len: 0,
            };
            file.write_all(&(text.len() as u64).to_le_bytes())?;
            file.write_all(&text)?;
            Ok(file)
        };
        let (path, file) = (path.to_path_buf(), create().during("write", path)?);
        Ok(Self {
            path,
            file,
            progress: Progress::none(),
            is_cancelled: None,
            unreported: 0,
            unsynced: 0,
        })
    }

    /// Reports the bytes written to `progress`.
    pub(crate) fn with_progress(self, progress: &Progress) -> Self {
        Self {
            progress: progress.clone(),
            ..self
        }
    }

    /// Gives up, with an error, when the flag is set.
    pub(crate) fn cancelled_by(self, is_cancelled: &'a AtomicBool) -> Self {
        Self {
            is_cancelled: Some(is_cancelled),
            ..self
        }
    }

    /// Fails if the flag of [`cancelled_by`](Self::cancelled_by) is set.
    fn check(&self) -> Result<(), CheckpointError> {
        match self.is_cancelled {
            Some(flag) if flag.load(Ordering::Relaxed) => Err(CheckpointError::Cancelled {
                path: self.path.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// Appends data; in total it must be exactly what the header describes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        bytes.chunks(STEP).try_for_each(|step| {
            self.check()?;
            self.write_step(step).during("write", &self.path)
        })
    }

    fn write_step(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.unreported += bytes.len();
        if self.unreported >= STEP {
            self.progress
                .add(std::mem::take(&mut self.unreported) as u64);
        }
        self.unsynced += bytes.len();
        if self.unsynced >= SYNC {
            self.file.flush()?;
            self.file.file.get_ref().sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Syncs the file. Returns its length and hash.
    pub(crate) fn finish(self) -> Result<(u64, u64), CheckpointError> {
        let Self {
            path,
            file,
            progress,
            unreported,
            ..
        } = self;
        let Hashing { file, hash, len } = file;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error);
        file.and_then(|file| file.sync_all())
            .during("write", &path)?;
        progress.add(unreported as u64);
        Ok((len, hash.digest()))
    }
}

/// Hashes and counts the bytes written through it.
struct Hashing<W> {
    file: W,
    hash: Xxh3,
    len: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = self.file.write(buf)?;
        self.hash.update(&buf[..written]);
        self.len += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_given_up_is_written_no_further() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut header = Header::default();
        header.push("a".into(), Dtype::U8, vec![STEP + 9]);
        let flag = AtomicBool::new(false);
        let mut file = DataFile::create(&path, header, None)
            .unwrap()
            .cancelled_by(&flag);
        file.write(&[1; 9]).unwrap();
        flag.store(true, Ordering::Relaxed);
        let error = file.write(&vec![2; STEP]).unwrap_err();
        assert!(matches!(error, CheckpointError::Cancelled { path: found } if found == path));
    }
}
