//! Files that have only the chunks of a rank's file that were fetched from another host.
//!
//! Such a file has the name of the rank's file and [`FETCHED`] after it, and its length; what was
//! not fetched is a hole, which takes no space. Nothing lists the chunks that are there: a chunk is
//! there if its bytes have its hash. So a kill or a power loss at any time does no harm.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use megaburn_collective::Progress;

use crate::{
    checkpoint::Checkpoint,
    chunks::ChunkOfFile,
    error::{CheckpointError, IoContext},
    fault::{Fault, retried},
    manifest::rank_of_file,
    open_file::OpenFile,
    runs::Runs,
};

/// At the end of the name of a file that has some chunks of a rank's file. A checkpoint's manifest
/// names no such file, so none is taken for the rank's file itself.
const FETCHED: &str = ".fetched";

/// The path of the file for chunks of the rank's file `name`, in the folder of a checkpoint.
pub(crate) fn fetched_path(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}{FETCHED}"))
}

/// Whether a file of this name has only chunks that were fetched.
pub(crate) fn is_fetched(name: &OsStr) -> bool {
    let name = name.to_str().and_then(|name| name.strip_suffix(FETCHED));
    name.and_then(rank_of_file).is_some()
}

/// Removes the file for chunks of the rank's file `name`, if there is one.
pub(crate) fn remove_fetched(folder: &Path, name: &str) -> Result<(), CheckpointError> {
    let path = fetched_path(folder, name);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.during("remove", &path),
    }
}

impl Checkpoint {
    /// Returns the chunks of `chunks` that `path` lacks, or holds damaged. They belong to file
    /// `file`.
    ///
    /// # Errors
    /// The system cannot read the file.
    pub(crate) fn missing_chunks(
        &self,
        file: usize,
        path: &Path,
        chunks: &BTreeSet<ChunkOfFile>,
        progress: &Progress,
    ) -> Result<BTreeSet<ChunkOfFile>, CheckpointError> {
        let opened = match retried(|| OpenFile::open(path, &self.manifest.files[file])) {
            Ok(opened) => opened,
            Err(error) => {
                expect_damage(error)?;
                return Ok(chunks.clone());
            }
        };
        let mut missing = BTreeSet::new();
        for &chunk in chunks {
            if let Err(error) = retried(|| self.verify_chunk(&opened, file, chunk, progress)) {
                expect_damage(error)?;
                missing.insert(chunk);
            }
        }
        Ok(missing)
    }

    /// Verifies the hashes of some chunks of file `file` in `path`.
    ///
    /// # Errors
    /// The file cannot be read, or a hash differs. The error names the tensor and the chunk.
    pub(crate) fn verify_chunks(
        &self,
        file: usize,
        path: &Path,
        chunks: &BTreeSet<ChunkOfFile>,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let opened = OpenFile::open(path, &self.manifest.files[file])?;
        let mut chunks = chunks.iter();
        chunks.try_for_each(|&chunk| self.verify_chunk(&opened, file, chunk, progress))
    }

    fn verify_chunk(
        &self,
        opened: &OpenFile,
        file: usize,
        (piece, chunk): ChunkOfFile,
        progress: &Progress,
    ) -> Result<(), CheckpointError> {
        let all_of_chunk = |runs: &mut Runs| runs.push_chunk(chunk);
        self.read_piece_of(opened, (file, piece), all_of_chunk, |bytes, _| {
            progress.add(bytes.len() as u64);
        })
    }
}

/// Returns the error, unless it says that something is damaged or missing.
fn expect_damage(error: CheckpointError) -> Result<(), CheckpointError> {
    match Fault::of(&error) {
        Fault::Damaged | Fault::Missing => Ok(()),
        Fault::Unreadable | Fault::OtherVersion => Err(error),
    }
}
