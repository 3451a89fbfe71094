use std::sync::atomic::AtomicBool;

use crate::safetensors_file::SafetensorsFile;

/// A file that is open for reading.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) file: SafetensorsFile,
    /// For each piece, which of its chunks have been read and verified.
    pub(crate) seen: Vec<Vec<AtomicBool>>,
}
