use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use megaburn_mesh::{Piece, ShardSpec};
use safetensors::tensor::{Metadata, TensorInfo};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    CheckpointError, FileInfo, NamedTensor, PieceInfo, dtype,
    error::IoContext,
    folder::sync_dir,
    manifest::{at_least_1d, hex},
};

/// What one rank is about to write: one owned piece.
struct Owned<'a> {
    info: PieceInfo,
    shape: Vec<usize>,
    dtype: safetensors::Dtype,
    shard: &'a ShardSpec,
    piece: &'a Piece,
    bytes: &'a [u8],
}

/// Writes what this rank owns of `tensors` to `folder/name` and syncs it; no file if it owns
/// nothing. The hash is taken of what is written, not of what the disk says afterwards.
pub(crate) fn write_rank_file(
    folder: &Path,
    name: &str,
    tensors: &[NamedTensor<'_>],
) -> Result<Option<FileInfo>, CheckpointError> {
    let mut owned = Vec::new();
    for tensor in tensors {
        collect(tensor, &mut owned)?;
    }
    if owned.is_empty() {
        return Ok(None);
    }
    // Wide elements first: every piece is then aligned, which other readers of the file like.
    owned.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.info.key.cmp(&b.info.key)));
    let path = folder.join(name);
    let (bytes, hash) = write(&path, &owned).during("write", &path)?;
    sync_dir(folder)?;
    let pieces = owned.into_iter().map(|owned| owned.info).collect();
    Ok(Some(FileInfo { name: name.to_string(), bytes, xxh3: hex(hash), pieces }))
}

fn collect<'a>(
    tensor: &'a NamedTensor<'_>,
    owned: &mut Vec<Owned<'a>>,
) -> Result<(), CheckpointError> {
    let NamedTensor { name, shard, data } = tensor;
    let expected: usize = shard.local_shape().iter().product();
    if data.num_elements() != expected {
        let (name, found) = (name.clone(), data.num_elements());
        return Err(CheckpointError::LocalShape { name, found, expected });
    }
    let dtype = tensor.file_dtype()?;
    let global_shape = at_least_1d(&shard.global_shape);
    for piece in shard.owned() {
        let mut shape = global_shape.clone();
        shape[shard.dim] = piece.global.len();
        let whole = shape == global_shape;
        let key = if whole { name.clone() } else { format!("{name}#{}", piece.global.start) };
        let range = piece.global.clone();
        let info = PieceInfo { tensor: name.clone(), key, dim: shard.dim, range };
        owned.push(Owned { info, shape, dtype, shard, piece, bytes: data.as_bytes() });
    }
    Ok(())
}

/// Returns length and hash.
fn write(path: &Path, owned: &[Owned<'_>]) -> io::Result<(u64, u64)> {
    let mut file = Hashing { file: BufWriter::new(File::create(path)?), hash: Xxh3::new(), len: 0 };
    let mut end = 0;
    let entry = |owned: &Owned<'_>| {
        let start = end;
        end += owned.shape.iter().product::<usize>() * dtype::size(owned.dtype);
        let (dtype, shape) = (owned.dtype, owned.shape.clone());
        (owned.info.key.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let entries = owned.iter().map(entry).collect();
    let header = Metadata::new(None, entries).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&header)?;
    // The format wants the data at a multiple of 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for Owned { shard, piece, dtype, bytes, .. } in owned {
        let size = dtype::size(*dtype);
        let mut result = Ok(());
        shard.for_each_run(piece, |local, _, len| {
            if result.is_ok() {
                result = file.write_all(&bytes[local * size..(local + len) * size]);
            }
        });
        result?;
    }
    let Hashing { file, hash, len } = file;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok((len, hash.digest()))
}

/// Hashes and counts what passes through.
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
