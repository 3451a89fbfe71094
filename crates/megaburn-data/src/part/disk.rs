//! Operations on files that are being written. Tests can make any of them fail.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::DataError;

/// A file that grows at its end. What was appended is on the disk after [`sync`](Self::sync).
#[derive(Debug)]
pub(crate) struct AppendFile {
    path: PathBuf,
    out: BufWriter<Guarded>,
    num_bytes: u64,
}

impl AppendFile {
    /// Opens or creates a file and cuts it to its first `keep` bytes.
    ///
    /// # Errors
    /// It is shorter, or cannot be written.
    pub(crate) fn open(path: PathBuf, keep: u64) -> Result<Self, DataError> {
        let opened = || -> io::Result<File> {
            step(&path)?;
            let mut options = OpenOptions::new();
            let mut file = options
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            if file.metadata()?.len() < keep {
                let why = format!("it is shorter than the {keep} bytes that were saved");
                return Err(io::Error::new(ErrorKind::UnexpectedEof, why));
            }
            file.set_len(keep)?;
            file.seek(SeekFrom::Start(keep))?;
            Ok(file)
        };
        let file = opened().map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => DataError::DamagedPart {
                path: path.clone(),
                why: source.to_string(),
            },
            _ => DataError::Write {
                path: path.clone(),
                source,
            },
        });
        let file = Guarded {
            file: file?,
            path: path.clone(),
        };
        Ok(Self {
            path,
            out: BufWriter::with_capacity(1 << 18, file),
            num_bytes: keep,
        })
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.num_bytes += bytes.len() as u64;
        written(&self.path, self.out.write_all(bytes))
    }

    /// Replaces the first bytes, of which there must be as many. The file does not grow after this.
    pub(crate) fn replace_start(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let start = self.out.seek(SeekFrom::Start(0));
        written(&self.path, start.and_then(|_| self.out.write_all(bytes)))
    }

    /// Number of bytes, including those that are not synced.
    pub(super) fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// Writes everything to the disk.
    pub(crate) fn sync(&mut self) -> Result<(), DataError> {
        let synced = self.out.flush().and_then(|()| {
            step(&self.path)?;
            to_disk(&self.out.get_ref().file)
        });
        written(&self.path, synced)
    }
}

/// Writes a whole file with `write` and syncs it.
pub(super) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<Guarded>) -> io::Result<()>,
) -> Result<(), DataError> {
    let all = || -> io::Result<()> {
        step(path)?;
        let file = Guarded {
            file: File::create(path)?,
            path: path.into(),
        };
        let mut out = BufWriter::with_capacity(1 << 18, file);
        write(&mut out)?;
        out.flush()?;
        step(path)?;
        to_disk(&out.get_ref().file)
    };
    written(path, all())
}

/// Renames a file, replacing `to`.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), DataError> {
    written(to, step(to).and_then(|()| fs::rename(from, to)))
}

/// Removes a file if it exists.
pub(crate) fn remove(path: &Path) -> Result<(), DataError> {
    let removed = step(path).and_then(|()| fs::remove_file(path));
    let is_gone = |error: &io::Error| error.kind() == ErrorKind::NotFound;
    written(
        path,
        removed.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) }),
    )
}

/// Removes an empty folder.
pub(super) fn remove_folder(path: &Path) -> Result<(), DataError> {
    written(path, step(path).and_then(|()| fs::remove_dir(path)))
}

/// Writes the entries of a folder to the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), DataError> {
    let synced = step(folder).and_then(|()| to_disk(&File::open(folder)?));
    written(folder, synced)
}

/// The folder that a path is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

pub(super) fn written<T>(path: &Path, result: io::Result<T>) -> Result<T, DataError> {
    result.map_err(|source| DataError::Write {
        path: path.into(),
        source,
    })
}

/// A file whose writes can fail in tests.
#[derive(Debug)]
pub(super) struct Guarded {
    file: File,
    path: PathBuf,
}

impl Seek for Guarded {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Write for Guarded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = step(&self.path) {
            // A process that is killed, or a disk that becomes full, leaves a part of a write.
            let _ = self.file.write_all(&bytes[..bytes.len() / 2]);
            return Err(error);
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(not(test))]
fn to_disk(file: &File) -> io::Result<()> {
    file.sync_all()
}

/// Tests end processes and not machines, so they save the time.
#[cfg(test)]
fn to_disk(_: &File) -> io::Result<()> {
    Ok(())
}

/// Precedes every operation on a file.
#[cfg(not(test))]
fn step(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
use fuse::step;

/// Makes operations on the files of a folder fail from a chosen one on, as after a kill or on a
/// full disk.
#[cfg(test)]
pub(crate) mod fuse {
    use std::collections::HashMap;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;

    /// The number of operations that succeed, by folder.
    static LEFT: Mutex<Option<HashMap<PathBuf, u64>>> = Mutex::new(None);

    pub(super) fn step(path: &Path) -> io::Result<()> {
        let mut left = LEFT.lock().unwrap();
        let mut folders = left.iter_mut().flatten();
        match folders.find(|(folder, _)| path.starts_with(folder)) {
            Some((_, 0)) => Err(io::Error::other("the fuse of the test has blown")),
            Some((_, count)) => {
                *count -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Lets `count` more operations on files below a folder succeed.
    pub(crate) fn allow(folder: &Path, count: u64) {
        let mut left = LEFT.lock().unwrap();
        left.get_or_insert_default().insert(folder.into(), count);
    }

    /// Lets all operations succeed.
    pub(crate) fn remove(folder: &Path) {
        LEFT.lock().unwrap().get_or_insert_default().remove(folder);
    }
}
