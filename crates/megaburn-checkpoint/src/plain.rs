use std::{
    fs::File,
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{
    error::{CheckpointError, IoContext},
    tensor_bytes::TensorBytes,
};

/// The number of files that stay open between reads. A rank that reads the checkpoint of a thousand
/// ranks needs a thousand files, and processes often may open no more than 1,024.
const MOST_OPEN: usize = 256;

/// The files of this process that stay open.
static NUM_OPEN: AtomicUsize = AtomicUsize::new(0);

/// A file for reading at any position. Some stay open, and the others are opened for each read.
///
/// It is not memory-mapped: if the disk or network fails or the file is shortened, reading returns
/// an error that names the file. With a mapping, that would be a SIGBUS.
#[derive(Debug)]
pub(crate) struct PlainFile {
    path: PathBuf,
    /// `None` if too many files are open.
    file: Option<File>,
    len: u64,
}

impl PlainFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).during("read", path)?;
        let len = file.metadata().during("read", path)?.len();
        let one_more = |open: usize| (open < MOST_OPEN).then_some(open + 1);
        let may_stay = NUM_OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        Ok(Self {
            path: path.to_path_buf(),
            file: may_stay.is_ok().then_some(file),
            len,
        })
    }

    /// The file's length in bytes when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl TensorBytes for PlainFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let read = match &self.file {
            Some(file) => file.read_exact_at(buffer, at),
            None => File::open(&self.path).and_then(|file| file.read_exact_at(buffer, at)),
        };
        match read {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                let why = format!(
                    "it became shorter while it was being read: it had {} bytes, and the {} \
                    bytes from byte {at} on are gone",
                    self.len,
                    buffer.len()
                );
                Err(CheckpointError::damaged(&self.path, why))
            }
            read => read.during("read", &self.path),
        }
    }
}

impl Drop for PlainFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            NUM_OPEN.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_shrinks_or_cannot_be_read_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        fs::write(&path, [7; 10_000]).unwrap();
        let file = PlainFile::open(&path).unwrap();
        let mut buffer = [0; 100];
        file.read_at(&mut buffer, 9_900).unwrap();
        assert_eq!((buffer, file.len()), ([7; 100], 10_000));
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4_096)
            .unwrap();
        let error = file.read_at(&mut buffer, 9_900).unwrap_err();
        assert!(
            error.is_damage() && error.to_string().contains("weights"),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("shorter while it was being read"),
            "{error}"
        );

        let folder = PlainFile::open(dir.path()).unwrap();
        let error = folder.read_at(&mut buffer, 0).unwrap_err();
        let named = error.to_string().contains(dir.path().to_str().unwrap());
        assert!(!error.is_damage() && named, "{error}");
    }
    #[test]
    fn many_files_are_read_with_few_open() {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..MOST_OPEN + 44)
            .map(|number| {
                let path = dir.path().join(number.to_string());
                fs::write(&path, [number as u8; 3]).unwrap();
                PlainFile::open(&path).unwrap()
            })
            .collect();
        let num_kept = files.iter().filter(|file| file.file.is_some()).count();
        assert!(num_kept <= MOST_OPEN, "{num_kept}");
        for (number, file) in files.iter().enumerate() {
            let mut buffer = [0; 2];
            file.read_at(&mut buffer, 1).unwrap();
            assert_eq!(buffer, [number as u8; 2]);
        }
        drop(files);
        let again = PlainFile::open(&dir.path().join("0")).unwrap();
        assert!(again.file.is_some());
    }
}
