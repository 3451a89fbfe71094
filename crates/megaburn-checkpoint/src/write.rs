use std::{
    cmp::Reverse,
    collections::HashMap,
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use megaburn_collective::Progress;
use megaburn_mesh::ShardPiece;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    chunks::ChunkHasher,
    dtype,
    error::{CheckpointError, IoContext},
    hex::hex,
    manifest::{FileInfo, PieceInfo, at_least_1d},
    named_tensor::NamedTensor,
    paths::sync_dir,
};

/// Writes what this rank owns of `tensors` to `folder/name` and syncs the file. If it owns nothing,
/// no file is written. The hash covers the bytes that are written, not those that the disk returns later.
pub(crate) fn write_rank_file(
    folder: &Path,
    name: &str,
    tensors: Vec<NamedTensor<'_>>,
    progress: &Progress,
) -> Result<Option<FileInfo>, CheckpointError> {
    let mut owned: Vec<_> = tensors
        .into_iter()
        .filter(|tensor| tensor.shard.owned().next().is_some())
        .collect();
    if owned.is_empty() {
        return Ok(None);
    }
    // Wide elements first, so that every piece is aligned, as some readers of the format prefer.
    owned.sort_by_cached_key(|tensor| (Reverse(tensor.dtype.size()), tensor.name.clone()));
    let mut pieces = Vec::new();
    let mut header = Header::default();
    for tensor in &owned {
        let global_shape = at_least_1d(&tensor.shard.global_shape);
        let dim = tensor.shard.dim;
        for ShardPiece { global, .. } in tensor.shard.owned() {
            let mut shape = global_shape.clone();
            shape[dim] = global.len();
            let tensor_name = &tensor.name;
            let start = global.start;
            let whole = shape == global_shape;
            let key = if whole {
                tensor_name.clone()
            } else {
                format!("{tensor_name}#{start}")
            };
            header.push(key.clone(), tensor.file_dtype()?, shape);
            let tensor = tensor_name.clone();
            let range = global.clone();
            pieces.push(PieceInfo {
                tensor,
                key,
                dim,
                range,
                chunks: Vec::new(),
            });
        }
    }
    let path = folder.join(name);
    progress.expect(header.end as u64);
    let mut file = DataFile::create(&path, header, None)?.with_progress(progress);
    let mut chunks = Vec::new();
    for tensor in owned {
        chunks.extend(write_tensor(&mut file, tensor)?);
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

/// Writes what this rank owns of a tensor. Returns the chunk hashes of each piece.
fn write_tensor(
    file: &mut DataFile,
    tensor: NamedTensor<'_>,
) -> Result<Vec<Vec<String>>, CheckpointError> {
    let NamedTensor {
        name,
        shard,
        dtype,
        data,
    } = tensor;
    let data = data()?;
    if data.dtype() != dtype {
        let why = format!("it is {:?}, but {dtype:?} was expected", data.dtype());
        return Err(CheckpointError::Source { name, why });
    }
    let found = data.num_elements();
    let expected = shard.local_shape().iter().product();
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
    for piece in shard.owned() {
        let mut hasher = ChunkHasher::new();
        let mut result = Ok(());
        shard.for_each_run(piece, |local, _, len| {
            if result.is_ok() {
                let run = &bytes[local * size..(local + len) * size];
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
    entries: Vec<(String, TensorInfo)>,
    end: usize,
}

impl Header {
    pub(crate) fn push(&mut self, key: String, dtype: Dtype, shape: Vec<usize>) {
        let start = self.end;
        self.end += shape.iter().product::<usize>() * dtype::size(dtype);
        self.entries.push((
            key,
            TensorInfo {
                dtype,
                shape,
                data_offsets: (start, self.end),
            },
        ));
    }
}

/// A safetensors file that is being written.
pub(crate) struct DataFile {
    path: PathBuf,
    file: Hashing<BufWriter<File>>,
    progress: Progress,
    /// Bytes since the last progress report, and since the last sync.
    unreported: usize,
    unsynced: usize,
}

/// Bytes per progress report.
const STEP: usize = 16 << 20;
/// Bytes per sync. Otherwise a host with much memory would cache all of a large file, and the sync
/// at the end would report no progress for as long as the disk needs.
const SYNC: usize = 1 << 30;

impl DataFile {
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

    /// Appends data; in total it must be exactly what the header describes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        bytes
            .chunks(STEP)
            .try_for_each(|step| self.write_step(step))
            .during("write", &self.path)
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
