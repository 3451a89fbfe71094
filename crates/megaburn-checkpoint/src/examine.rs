//! Finds everything that is damaged in a checkpoint, where opening and verifying it stop at the
//! first damage.

use std::{
    fs,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use crate::{
    checkpoint::read_manifest,
    error::{CheckpointError, IoContext},
    fault::{Fault, retried},
    hex::hex,
    manifest::{FileInfo, Manifest},
    plain::PlainFile,
    safetensors_file::SafetensorsFile,
    tensor_bytes::TensorBytes,
};

/// Bytes of a file that are read at once.
const BLOCK: u64 = 4 << 20;

/// A damaged part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: PathBuf,
    /// The tensor whose values are damaged, if that is known.
    pub tensor: Option<String>,
    /// The number of the damaged chunk of the tensor's piece in this file, and the number of chunks
    /// of that piece.
    pub chunk: Option<(usize, usize)>,
    /// The description of the damage.
    pub why: String,
}

/// What [`examine`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Examined {
    /// Number of files that the manifest names; 0 if the manifest is damaged.
    pub num_files: usize,
    /// Bytes of these files.
    pub num_bytes: u64,
    /// Everything that is damaged; empty if the checkpoint is whole.
    pub damage: Vec<Damage>,
}

/// Compares all files of the checkpoint in the folder `path` with the lengths and hashes that were
/// written, and lists all damage. `on_bytes` is called with numbers of bytes as they are read; the
/// sum counts each file once, and a damaged file a second time, because it is read again.
///
/// # Errors
/// The system cannot read a file, or another version wrote the checkpoint. Then nothing is known
/// about its contents.
pub fn examine(path: &Path, on_bytes: &mut dyn FnMut(u64)) -> Result<Examined, CheckpointError> {
    let mut found = Examined {
        num_files: 0,
        num_bytes: 0,
        damage: Vec::new(),
    };
    let Some(manifest) = of_file(retried(|| read_manifest(path)), &mut found.damage)? else {
        return Ok(found);
    };
    found.num_files = manifest.files.len();
    found.num_bytes = manifest.files.iter().map(|file| file.bytes).sum();
    for file in &manifest.files {
        let is_whole = retried(|| check_file(path, file, on_bytes));
        if of_file(is_whole, &mut found.damage)? == Some(false) {
            let parts = retried(|| damaged_parts(path, &manifest, file, on_bytes));
            let parts = of_file(parts, &mut found.damage)?;
            found.damage.extend(parts.unwrap_or_default());
        }
    }
    Ok(found)
}

/// The bytes that [`examine`] will read if nothing is damaged; 0 if the manifest cannot be read.
pub fn bytes_to_examine(path: &Path) -> u64 {
    read_manifest(path).map_or(0, |manifest| {
        manifest.files.iter().map(|file| file.bytes).sum()
    })
}

/// Adds an error that shows damage to the list, and returns any other.
fn of_file<T>(
    result: Result<T, CheckpointError>,
    damage: &mut Vec<Damage>,
) -> Result<Option<T>, CheckpointError> {
    let error = match result {
        Ok(value) => return Ok(Some(value)),
        Err(error) => error,
    };
    if !matches!(Fault::of(&error), Fault::Damaged | Fault::Missing) {
        return Err(error);
    }
    let (file, why) = match error {
        CheckpointError::Damaged { file, why } => (file, why),
        CheckpointError::Missing { file } => (file, "it is missing".to_string()),
        CheckpointError::Io { path, source, .. } => (path, source.to_string()),
        error => return Err(error),
    };
    damage.push(Damage {
        file,
        tensor: None,
        chunk: None,
        why,
    });
    Ok(None)
}

/// Whether the hash of a file is the one that was written.
pub(crate) fn check_file(
    folder: &Path,
    info: &FileInfo,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<bool, CheckpointError> {
    let path = folder.join(&info.name);
    let found = fs::metadata(&path).during_read(&path)?.len();
    if found != info.bytes {
        let why = format!("it has {found} bytes of {}", info.bytes);
        return Err(CheckpointError::damaged(&path, why));
    }
    let file = PlainFile::open(&path)?;
    Ok(hash(&file, 0, info.bytes, on_bytes)? == info.xxh3)
}

/// The damaged parts of a file whose hash is wrong.
fn damaged_parts(
    folder: &Path,
    manifest: &Manifest,
    info: &FileInfo,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<Vec<Damage>, CheckpointError> {
    let path = folder.join(&info.name);
    let header = SafetensorsFile::open(&path)?;
    let mut damage = Vec::new();
    let mut add = |tensor: Option<&str>, chunk, why| {
        let file = path.clone();
        let tensor = tensor.map(String::from);
        damage.push(Damage {
            file,
            tensor,
            chunk,
            why,
        });
    };
    for piece in &info.pieces {
        let tensor = Some(piece.tensor.as_str());
        let Some(stored) = header.info(&piece.key).map(|found| header.stored(found)) else {
            add(tensor, None, format!("the file has no `{}`", piece.key));
            continue;
        };
        let Some(len) = manifest.chunk_bytes else {
            continue;
        };
        let num_chunks = piece.chunks.len();
        if stored.len.div_ceil(len) != num_chunks as u64 {
            let why = format!(
                "it has {} bytes, but {num_chunks} hashes of chunks",
                stored.len
            );
            add(tensor, None, why);
            continue;
        }
        for (chunk, written) in piece.chunks.iter().enumerate() {
            let start = chunk as u64 * len;
            let end = (start + len).min(stored.len);
            let at = stored.start + start;
            let found = hash(stored.file, at, end - start, on_bytes)?;
            if found != *written {
                let why =
                    format!("bytes {start}..{end} have xxh3 {found}, but {written} was written");
                add(tensor, Some((chunk, num_chunks)), why);
            }
        }
    }
    if damage.is_empty() {
        // The header is damaged, or an older version wrote no hashes of chunks.
        let why = format!("its xxh3 is not {}, which was written", info.xxh3);
        damage.push(Damage {
            file: path,
            tensor: None,
            chunk: None,
            why,
        });
    }
    Ok(damage)
}

/// The xxh3 of `len` bytes from `start` on, in hexadecimal.
fn hash(
    file: &dyn TensorBytes,
    start: u64,
    len: u64,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<String, CheckpointError> {
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; BLOCK.min(len) as usize];
    for at in (start..start + len).step_by(BLOCK as usize) {
        let block = &mut buffer[..(start + len - at).min(BLOCK) as usize];
        file.read_at(block, at)?;
        hash.update(block);
        on_bytes(block.len() as u64);
    }
    Ok(hex(hash.digest()))
}
