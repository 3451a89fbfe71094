//! A file of tensors that is being written.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use megaburn_collective::Progress;

use super::background_sync::BackgroundSync;
use crate::error::{CheckpointError, IoContext};

/// A file that is written from its start to its end, and synced meanwhile.
pub(crate) struct DataFile<'a> {
    path: PathBuf,
    file: BufWriter<File>,
    sync: BackgroundSync,
    progress: Progress,
    is_cancelled: Option<&'a AtomicBool>,
    /// Bytes in total, since the last progress report, and since the last sync began.
    num_bytes: u64,
    unreported: usize,
    unsynced: usize,
}

/// Bytes per progress report.
const STEP: usize = 16 << 20;
/// Bytes per sync. The disk works while the next bytes are written, and the sync at the end is
/// short. Otherwise a host with much memory would cache all of a large file first, and that sync
/// would report no progress for as long as the disk needs.
const SYNC: usize = 128 << 20;
/// Bytes of short rows that are gathered before they are written.
const BUFFER: usize = 1 << 20;

impl<'a> DataFile<'a> {
    /// Creates the file, with these bytes at its start.
    pub(crate) fn create(path: &Path, header: &[u8]) -> Result<Self, CheckpointError> {
        let create = || {
            let mut file = BufWriter::with_capacity(BUFFER, File::create(path)?);
            file.write_all(header)?;
            Ok(file)
        };
        Ok(Self {
            path: path.to_path_buf(),
            file: create().during("write", path)?,
            sync: BackgroundSync::default(),
            progress: Progress::none(),
            is_cancelled: None,
            num_bytes: header.len() as u64,
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
        self.num_bytes += bytes.len() as u64;
        self.unreported += bytes.len();
        if self.unreported >= STEP {
            self.progress
                .add(std::mem::take(&mut self.unreported) as u64);
        }
        self.unsynced += bytes.len();
        if self.unsynced >= SYNC {
            self.file.flush()?;
            self.sync.start(self.file.get_ref())?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Syncs the file. Returns its length.
    pub(crate) fn finish(self) -> Result<u64, CheckpointError> {
        let Self {
            path,
            file,
            mut sync,
            progress,
            num_bytes,
            unreported,
            ..
        } = self;
        let finish = || {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            sync.wait()?;
            file.sync_all()
        };
        finish().during("write", &path)?;
        progress.add(unreported as u64);
        Ok(num_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_given_up_is_written_no_further() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let flag = AtomicBool::new(false);
        let mut file = DataFile::create(&path, b"header")
            .unwrap()
            .cancelled_by(&flag);
        file.write(&[1; 9]).unwrap();
        flag.store(true, Ordering::Relaxed);
        let error = file.write(&vec![2; STEP]).unwrap_err();
        assert!(matches!(error, CheckpointError::Cancelled { path: found } if found == path));
    }

    #[test]
    fn a_file_that_is_synced_on_the_way_has_all_bytes_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut file = DataFile::create(&path, b"header").unwrap();
        // Rows that are shorter and longer than the buffer; the second one passes a sync.
        let rows: Vec<Vec<u8>> = [3, BUFFER + 1, 7]
            .iter()
            .enumerate()
            .map(|(number, len)| (0..*len).map(|i| (i * (number + 3)) as u8).collect())
            .collect();
        let mut expected = b"header".to_vec();
        for row in &rows {
            file.unsynced += SYNC - BUFFER;
            file.write(row).unwrap();
            expected.extend_from_slice(row);
        }
        assert_eq!(file.finish().unwrap(), expected.len() as u64);
        assert!(std::fs::read(&path).unwrap() == expected);
    }

    /// Every write to this device fails because the disk is full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut file = DataFile::create(Path::new("/dev/full"), &[1; 8]).unwrap();
        let error = file.write(&[2; BUFFER]).unwrap_err().to_string();
        assert!(error.contains("cannot write /dev/full"), "{error}");
        let file = DataFile::create(Path::new("/dev/full"), &[1; 8]).unwrap();
        let error = file.finish().unwrap_err().to_string();
        assert!(error.contains("cannot write /dev/full"), "{error}");
    }
}
