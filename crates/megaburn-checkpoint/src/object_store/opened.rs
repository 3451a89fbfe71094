use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use crate::{
    checkpoint::read_manifest,
    error::{CheckpointError, IoContext},
    hex::hex,
    manifest::{MANIFEST, MANIFEST_HASH, Manifest, rank_of_file},
};

/// Bytes of a file that are read at once.
const BLOCK: u64 = 4 << 20;

/// The files of a checkpoint that a rank uploads. They are open, so that the checkpoint may be
/// deleted meanwhile.
#[derive(Debug)]
pub struct OpenedCheckpoint {
    /// The files of the rank: usually the one that it has written.
    pub(crate) own: Vec<OpenedFile>,
    /// The manifest, only on rank 0.
    pub(crate) manifest: Option<OpenedManifest>,
}

/// A file of a rank.
#[derive(Debug)]
pub(crate) struct OpenedFile {
    pub(crate) name: String,
    path: PathBuf,
    pub(crate) file: File,
}

/// A manifest and its files.
#[derive(Debug)]
pub(crate) struct OpenedManifest {
    pub(crate) manifest: Manifest,
    pub(crate) text: File,
    pub(crate) hash: File,
}

impl OpenedCheckpoint {
    /// Opens what rank `rank` of `num_ranks` uploads of the checkpoint in the folder `path`: the file
    /// that it has written, and those of higher ranks if more ranks have written the checkpoint.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(path: &Path, rank: usize, num_ranks: usize) -> Result<Self, CheckpointError> {
        let open = |name: &str| {
            let path = path.join(name);
            File::open(&path).during_read(&path)
        };
        let mut own = Vec::new();
        for entry in fs::read_dir(path).during("read the folder", path)? {
            let name = entry.during("read the folder", path)?.file_name();
            let name = name.to_string_lossy().into_owned();
            if rank_of_file(&name).is_some_and(|writer| writer % num_ranks == rank) {
                let (path, file) = (path.join(&name), open(&name)?);
                own.push(OpenedFile { name, path, file });
            }
        }
        let manifest = || {
            Ok::<_, CheckpointError>(OpenedManifest {
                manifest: read_manifest(path)?,
                text: open(MANIFEST)?,
                hash: open(MANIFEST_HASH)?,
            })
        };
        let manifest = (rank == 0).then(manifest).transpose()?;
        Ok(Self { own, manifest })
    }
}

impl OpenedFile {
    /// The xxh3 of the first `num_bytes` of the file, in hexadecimal. `is_stopped` is asked with
    /// numbers of bytes as they are read.
    ///
    /// # Errors
    /// The file cannot be read, or the work was stopped.
    pub(crate) fn hash(
        &self,
        num_bytes: u64,
        is_stopped: impl Fn(u64) -> bool,
    ) -> Result<String, CheckpointError> {
        let mut hash = Xxh3::new();
        let mut buffer = vec![0; BLOCK.min(num_bytes) as usize];
        for at in (0..num_bytes).step_by(BLOCK as usize) {
            let block = &mut buffer[..(num_bytes - at).min(BLOCK) as usize];
            self.file
                .read_exact_at(block, at)
                .during("read", &self.path)?;
            hash.update(block);
            if is_stopped(block.len() as u64) {
                let path = self.path.clone();
                return Err(CheckpointError::Cancelled { path });
            }
        }
        Ok(hex(hash.digest()))
    }
}
