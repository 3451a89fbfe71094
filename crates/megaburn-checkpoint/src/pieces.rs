//! Reads and verifies the parts of a checkpoint's tensors that a rank needs.

use std::ops::Range;

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use megaburn_mesh::{ShardPiece, ShardSpec};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    buffer::filled,
    cast,
    checkpoint::Checkpoint,
    chunks::Chunks,
    error::CheckpointError,
    fetched::fetched_path,
    hex::hex,
    intersect::{DimSlice, for_each_shared_run},
    manifest::{PieceInfo, TensorInfo, at_least_1d},
    open_file::OpenFile,
    plain::PlainFile,
    runs::{Runs, Stored},
    safetensors_file::SafetensorsFile,
    tensor_bytes::TensorBytes,
};

/// Bytes of a file that are hashed at once.
const VERIFY_BLOCK: usize = 4 << 20;

impl Checkpoint {
    /// Verifies the hash of a file.
    ///
    /// # Errors
    /// The file cannot be read, or its hash differs. Then the error names the tensor, if the
    /// manifest has hashes of chunks.
    pub(crate) fn verify_file(
        &self,
        file: usize,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let info = &self.manifest.files[file];
        let path = self.path.join(&info.name);
        let plain = PlainFile::open(&path)?;
        let mut hash = Xxh3::new();
        let mut buffer = vec![0; VERIFY_BLOCK];
        for at in (0..plain.len()).step_by(VERIFY_BLOCK) {
            let block = &mut buffer[..(plain.len() - at).min(VERIFY_BLOCK as u64) as usize];
            plain.read_at(block, at)?;
            hash.update(block);
            progress.add(block.len() as u64);
        }
        let found = hex(hash.digest());
        if found == info.xxh3 {
            return Ok(());
        }
        // Find the damaged tensor, if the manifest has hashes of chunks. Reads may be from another
        // file, which has only what was fetched from another host.
        if !self.fetched.contains(&file) {
            for piece in 0..info.pieces.len() {
                self.read_piece((file, piece), Runs::push_all, |_, _| {})?;
            }
        }
        let why = format!("its xxh3 is {found}, but {} was written", info.xxh3);
        Err(CheckpointError::damaged(&path, why))
    }

    /// Reads the part of the tensor `name` that `shard` selects: this rank's part under its own
    /// layout. See [`read_range`](Self::read_range).
    ///
    /// # Shapes
    /// `shard.local_shape()`, with zero padding.
    /// # Errors
    /// As [`read_range`](Self::read_range).
    pub fn read(
        &self,
        name: &str,
        shard: &ShardSpec,
        dtype: DType,
    ) -> Result<TensorData, CheckpointError> {
        let shape = shard.local_shape();
        let data = self.read_range(name, shard, 0..shape.iter().product(), dtype)?;
        Ok(TensorData::from_bytes(data.into_bytes(), shape, dtype))
    }

    /// Reads the range `range` of the flattened part of the tensor `name` that `shard` selects: what
    /// a rank keeps of a sharded optimizer state. Floats of another type are cast to `dtype`,
    /// rounding to nearest, as they are read. Besides the result, one block of 1 MiB is in memory.
    ///
    /// The bytes that are used are verified. The first time this `Checkpoint` reads from a chunk
    /// (64 MiB of a stored piece), it reads the full chunk and compares its hash with the manifest.
    /// From a chunk that it has verified, it reads only the slices needed. Checkpoints of older
    /// versions have one hash per file and no chunks; of those, only the slices needed are read,
    /// without verification.
    ///
    /// # Shapes
    /// `[range.len()]`, with zero padding.
    /// # Errors
    /// There is no such tensor (the error names the nearest); the global shape differs (a
    /// checkpoint of another model); the element type cannot be cast to `dtype`; or a file is
    /// damaged, and the error names the tensor and the chunk.
    pub fn read_range(
        &self,
        name: &str,
        shard: &ShardSpec,
        range: Range<usize>,
        dtype: DType,
    ) -> Result<TensorData, CheckpointError> {
        let info = self.info(name)?;
        let stored = self.dtype(name)?;
        let path = self.path.clone();
        let name = name.to_string();
        if info.global_shape != shard.global_shape {
            let expected = shard.global_shape.clone();
            let found = info.global_shape.clone();
            return Err(CheckpointError::GlobalShape {
                path,
                name,
                expected,
                found,
            });
        }
        let Some(copy) = cast::copy(stored, dtype) else {
            let expected = format!("{dtype:?}");
            let found = info.dtype.to_string();
            return Err(CheckpointError::Dtype {
                path,
                name,
                expected,
                found,
            });
        };
        let from_size = stored.size();
        let to_size = dtype.size();
        filled(vec![range.len()], dtype, |local| {
            for &(file, number) in self.index.get(&name).into_iter().flatten() {
                let piece = &self.manifest.files[file].pieces[number];
                let found = shared_runs(info, piece, shard, &range);
                // A file that has none of the elements is not opened.
                if found.is_empty() {
                    continue;
                }
                let wanted = |runs: &mut Runs| {
                    found
                        .into_iter()
                        .for_each(|(a, b, len)| runs.push(a, b, len))
                };
                self.read_piece((file, number), wanted, |bytes, to| {
                    let len = bytes.len() / from_size * to_size;
                    copy(bytes, &mut local[to * to_size..][..len]);
                })?;
            }
            Ok(())
        })
    }

    /// Reads the runs that `wanted` selects from piece `number` of file `file`, and calls `copy`
    /// with the bytes of each run and its destination element.
    fn read_piece(
        &self,
        (file, number): (usize, usize),
        wanted: impl FnOnce(&mut Runs),
        copy: impl FnMut(&[u8], usize),
    ) -> Result<(), CheckpointError> {
        self.read_piece_of(self.file(file)?, (file, number), wanted, copy)
    }

    /// Like [`read_piece`](Self::read_piece), from `opened` in place of the checkpoint's own file.
    pub(crate) fn read_piece_of(
        &self,
        opened: &OpenFile,
        (file, number): (usize, usize),
        wanted: impl FnOnce(&mut Runs),
        copy: impl FnMut(&[u8], usize),
    ) -> Result<(), CheckpointError> {
        let piece = &self.manifest.files[file].pieces[number];
        let stored = self.stored(&opened.file, piece)?;
        let seen = &opened.seen[number];
        let tensor = piece.tensor.as_str();
        let hashes = piece.chunks.as_slice();
        let chunks = self.manifest.chunk_bytes.map(|len| Chunks {
            tensor,
            len,
            hashes,
            seen,
        });
        let mut runs = Runs::new(&stored, self.manifest.chunk_bytes);
        wanted(&mut runs);
        runs.read(stored, chunks, copy)
    }

    /// The position of a piece's bytes according to the file's own header.
    pub(crate) fn stored<'a>(
        &self,
        file: &'a SafetensorsFile,
        piece: &PieceInfo,
    ) -> Result<Stored<'a>, CheckpointError> {
        let info = &self.manifest.tensors[&piece.tensor];
        let (dtype, shape) = (&info.dtype, piece.stored_shape(info));
        let found = file
            .info(&piece.key)
            .filter(|i| i.shape == shape && i.dtype == *dtype);
        let found = found.ok_or_else(|| {
            let why = format!("it has no `{}` with {dtype} {shape:?}", piece.key);
            CheckpointError::damaged(file.path(), why)
        })?;
        Ok(file.stored(found))
    }

    /// Opens a file on first use, or the one that has what was fetched of it.
    fn file(&self, file: usize) -> Result<&OpenFile, CheckpointError> {
        if self.files[file].get().is_none() {
            let info = &self.manifest.files[file];
            let path = if self.fetched.contains(&file) {
                fetched_path(&self.path, &info.name)
            } else {
                self.path.join(&info.name)
            };
            // Another thread may have been first; either value will do.
            let _ = self.files[file].set(OpenFile::open(&path, info)?);
        }
        Ok(self.files[file].get().expect("the cell was just set"))
    }
}

/// The runs of elements of `range` that a stored piece has: their places in the piece and in the
/// result, and their lengths.
pub(crate) fn shared_runs(
    info: &TensorInfo,
    piece: &PieceInfo,
    shard: &ShardSpec,
    range: &Range<usize>,
) -> Vec<(usize, usize, usize)> {
    let shape = at_least_1d(&shard.global_shape);
    let mut found = Vec::new();
    let may_have = |wanted: &&ShardPiece| shares(piece, shard.dim, wanted);
    for wanted in shard.pieces.iter().filter(may_have) {
        let stored = DimSlice {
            dim: piece.dim,
            global: piece.range.clone(),
            start: 0,
            len: piece.range.len(),
            elements: piece.stored_elements(info),
        };
        let wanted = DimSlice {
            dim: shard.dim,
            global: wanted.global.clone(),
            start: wanted.local.start,
            len: shard.local_len,
            elements: range.clone(),
        };
        for_each_shared_run(&shape, &stored, &wanted, |a, b, len| {
            found.push((a, b, len))
        });
    }
    found
}

/// Whether a stored piece can hold elements of a wanted one.
fn shares(stored: &PieceInfo, dim: usize, wanted: &ShardPiece) -> bool {
    let a = &stored.range;
    let b = &wanted.global;
    stored.dim != dim || (a.start < b.end && b.start < a.end)
}
