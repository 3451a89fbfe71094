use std::{path::Path, sync::atomic::AtomicBool};

use crate::{
    error::CheckpointError,
    manifest::{FileInfo, PieceInfo},
    safetensors_file::SafetensorsFile,
};

/// A file that is open for reading.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) file: SafetensorsFile,
    /// For each piece, which of its chunks have been read and verified.
    pub(crate) seen: Vec<Vec<AtomicBool>>,
}

impl OpenFile {
    /// Opens the file at `path`, which the manifest describes with `info`.
    ///
    /// # Errors
    /// As [`SafetensorsFile::open`].
    pub(crate) fn open(path: &Path, info: &FileInfo) -> Result<Self, CheckpointError> {
        let unseen = |piece: &PieceInfo| {
            let chunks = piece.chunks.iter();
            chunks.map(|_| AtomicBool::new(false)).collect()
        };
        Ok(Self {
            file: SafetensorsFile::open(path)?,
            seen: info.pieces.iter().map(unseen).collect(),
        })
    }
}
