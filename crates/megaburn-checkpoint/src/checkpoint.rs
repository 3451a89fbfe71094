use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use megaburn_mesh::{Piece, ShardSpec};
use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::{
    CheckpointError, FileInfo, Manifest, PieceInfo, TensorInfo,
    buffer::filled,
    cast,
    error::IoContext,
    manifest::{FORMAT, MANIFEST, MANIFEST_HASH, at_least_1d, hex},
    mapped::MappedFile,
    mmap::map,
    overlap::{Stretch, for_each_shared_run},
    source::nearest,
};

/// An opened checkpoint: what it says of itself, and its tensors, of which each rank reads the
/// slices it needs.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// Where each tensor's pieces are: (file, piece).
    index: BTreeMap<String, Vec<(usize, usize)>>,
    files: Vec<OnceLock<MappedFile>>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`. Its manifest is verified, and that every file is
    /// there in full length; the files' hashes are not, see [`find_latest`](crate::find_latest)
    /// and [`Checkpoint::verify`].
    ///
    /// # Errors
    /// A missing, unreadable or damaged manifest, another format version, a missing or truncated
    /// file.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let manifest = read_manifest(path)?;
        let mut index: BTreeMap<String, Vec<(usize, usize)>> = BTreeMap::new();
        for (f, file) in manifest.files.iter().enumerate() {
            let file_path = path.join(&file.name);
            let found = fs::metadata(&file_path).during_read(&file_path)?.len();
            if found != file.bytes {
                let why = format!("it has {found} bytes of {}", file.bytes);
                return Err(CheckpointError::damaged(&file_path, why));
            }
            for (p, piece) in file.pieces.iter().enumerate() {
                index.entry(piece.tensor.clone()).or_default().push((f, p));
            }
        }
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { path: path.to_path_buf(), manifest, index, files })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Updates done when it was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The model's configuration, as it was given to [`save`](crate::save).
    pub fn model(&self) -> &Value {
        &self.manifest.model
    }

    /// The trainer's state, as it was given to [`save`](crate::save).
    pub fn trainer(&self) -> &Value {
        &self.manifest.trainer
    }

    /// Everything it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.manifest.tensors.contains_key(name)
    }

    /// The element type in which a tensor is stored.
    ///
    /// # Errors
    /// No such tensor (the nearest name is given).
    pub fn dtype(&self, name: &str) -> Result<DType, CheckpointError> {
        Ok(self.info(name)?.dtype())
    }

    /// The shape of a whole tensor, without padding.
    ///
    /// # Errors
    /// No such tensor (the nearest name is given).
    pub fn global_shape(&self, name: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.info(name)?.global_shape)
    }

    /// Compares every file with its hash.
    ///
    /// # Errors
    /// The first file that cannot be read or is not what was written.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_with(&Progress::none())
    }

    /// The same for a rank that others wait for: it tells `progress` of the bytes that it has read.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn verify_with(&self, progress: &Progress) -> Result<(), CheckpointError> {
        self.verify_files(0..self.files.len(), progress)
    }

    pub(crate) fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Compares some files with their hashes.
    pub(crate) fn verify_files(
        &self,
        files: impl IntoIterator<Item = usize>,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let files: Vec<_> = files.into_iter().map(|file| &self.manifest.files[file]).collect();
        progress.expect(files.iter().map(|file| file.bytes).sum());
        files.into_iter().try_for_each(|file| self.verify_file(file, progress))
    }

    fn verify_file(&self, info: &FileInfo, progress: &Progress) -> Result<(), CheckpointError> {
        const STEP: usize = 64 << 20;
        let path = self.path.join(&info.name);
        let map = map(&path).during("read", &path)?;
        let mut hash = Xxh3::new();
        for step in map.chunks(STEP) {
            hash.update(step);
            progress.add(step.len() as u64);
        }
        let found = hex(hash.digest());
        if found != info.xxh3 {
            let why = format!("its xxh3 is {found}, and {} was written", info.xxh3);
            return Err(CheckpointError::damaged(&path, why));
        }
        Ok(())
    }

    /// Reads what `shard` says of the tensor `name`: this rank's part under its own layout. Only
    /// these slices are read from disk. Floats of another type become `dtype`, each rounded to the
    /// nearest, on the way: nothing else is in memory than the result.
    ///
    /// # Shapes
    /// `shard.local_shape()`, padding zero.
    /// # Errors
    /// No such tensor (the nearest name is given), another global shape (a checkpoint of another
    /// model), an element type that does not become `dtype`, a damaged file.
    pub fn read(
        &self,
        name: &str,
        shard: &ShardSpec,
        dtype: DType,
    ) -> Result<TensorData, CheckpointError> {
        let (info, stored) = (self.info(name)?, self.dtype(name)?);
        let (path, name) = (self.path.clone(), name.to_string());
        if info.global_shape != shard.global_shape {
            let (expected, found) = (shard.global_shape.clone(), info.global_shape.clone());
            return Err(CheckpointError::GlobalShape { path, name, expected, found });
        }
        let Some(copy) = cast::copy(stored, dtype) else {
            let (expected, found) = (format!("{dtype:?}"), info.dtype.to_string());
            return Err(CheckpointError::Dtype { path, name, expected, found });
        };
        let shape = at_least_1d(&shard.global_shape);
        let (from_size, to_size) = (stored.size(), dtype.size());
        let local_shape = shard.local_shape();
        filled(local_shape, dtype, |local| {
            for &(file, piece) in self.index.get(&name).into_iter().flatten() {
                let piece = &self.manifest.files[file].pieces[piece];
                let shared = shard.pieces.iter().filter(|wanted| shares(piece, shard.dim, wanted));
                for wanted in shared {
                    let bytes = self.piece_bytes(file, piece, &shape, info.dtype)?;
                    let (range, dim) = (piece.range.clone(), piece.dim);
                    let stored = Stretch { dim, len: range.len(), global: range, start: 0 };
                    let (global, start) = (wanted.global.clone(), wanted.local.start);
                    let wanted = Stretch { dim: shard.dim, len: shard.local_len, global, start };
                    for_each_shared_run(&shape, &stored, &wanted, |from, to, len| {
                        copy(
                            &bytes[from * from_size..(from + len) * from_size],
                            &mut local[to * to_size..(to + len) * to_size],
                        );
                    });
                }
            }
            Ok(())
        })
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        let tensors = &self.manifest.tensors;
        tensors.get(name).ok_or_else(|| CheckpointError::MissingTensor {
            path: self.path.clone(),
            name: name.to_string(),
            nearest: nearest(name, tensors.keys()),
        })
    }

    /// The bytes of a piece, checked against the file's own header.
    fn piece_bytes(
        &self,
        file: usize,
        piece: &PieceInfo,
        global_shape: &[usize],
        dtype: safetensors::Dtype,
    ) -> Result<&[u8], CheckpointError> {
        let mut shape = global_shape.to_vec();
        shape[piece.dim] = piece.range.len();
        let file = self.file(file)?;
        let found = file.info(&piece.key).filter(|i| i.shape == shape && i.dtype == dtype);
        let found = found.ok_or_else(|| {
            let why = format!("it lacks `{}` as {dtype} {shape:?}", piece.key);
            CheckpointError::damaged(&file.path, why)
        })?;
        Ok(file.bytes(found))
    }

    /// Maps a file at its first use.
    fn file(&self, file: usize) -> Result<&MappedFile, CheckpointError> {
        if self.files[file].get().is_none() {
            let path = self.path.join(&self.manifest.files[file].name);
            // Another thread may have been first; either map will do.
            let _ = self.files[file].set(MappedFile::open(&path)?);
        }
        Ok(self.files[file].get().expect("it was just set"))
    }
}

/// Whether a stored piece can hold elements of a wanted one.
fn shares(stored: &PieceInfo, dim: usize, wanted: &Piece) -> bool {
    let (a, b) = (&stored.range, &wanted.global);
    stored.dim != dim || (a.start < b.end && b.start < a.end)
}

fn read_manifest(folder: &Path) -> Result<Manifest, CheckpointError> {
    let path = folder.join(MANIFEST);
    let text = fs::read(&path).during_read(&path)?;
    let damaged = |why: String| CheckpointError::damaged(&path, why);
    let value: Value = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
    let version = value.get("format").and_then(Value::as_u64).filter(|&found| found != FORMAT);
    let hash_path = folder.join(MANIFEST_HASH);
    let hash = match fs::read_to_string(&hash_path) {
        // A version that hashes otherwise is free to keep its hash elsewhere.
        Err(error) if version.is_some() && error.kind() == ErrorKind::NotFound => None,
        hash => Some(hash.during_read(&hash_path)?),
    };
    // The version is believed after the hash: it may be what is damaged.
    let found = hex(xxh3_64(&text));
    if let Some(hash) = hash.filter(|hash| *hash != found) {
        return Err(damaged(format!("its xxh3 is {found}, and {MANIFEST_HASH} says {hash}")));
    }
    if let Some(found) = version {
        return Err(CheckpointError::UnknownVersion { path, found, supported: FORMAT });
    }
    let manifest: Manifest = serde_json::from_value(value).map_err(|e| damaged(e.to_string()))?;
    manifest.check().map_err(|(name, why)| damaged(format!("tensor `{name}`: {why}")))?;
    Ok(manifest)
}
