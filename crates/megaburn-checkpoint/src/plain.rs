use std::{
    fs::File,
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use crate::error::{CheckpointError, IoContext};

/// A file that is open for reading at any position.
///
/// It is not memory-mapped: if the disk or network fails or the file is shortened, reading returns
/// an error that names the file. With a mapping, that would be a SIGBUS.
#[derive(Debug)]
pub(crate) struct PlainFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl PlainFile {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = File::open(path).during("read", path)?;
        let len = file.metadata().during("read", path)?.len();
        Ok(Self {
            path: path.to_path_buf(),
            file,
            len,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length in bytes when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills the buffer with the bytes from `at` on.
    pub(crate) fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        match self.file.read_exact_at(buffer, at) {
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
}
