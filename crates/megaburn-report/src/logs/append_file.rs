//! A file of a log: what cannot be written waits in memory.

use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
};

/// Bytes that may wait; further records are dropped.
const LARGEST: usize = 64 << 20;

/// A file that records are appended to.
#[derive(Debug)]
pub(super) struct AppendFile {
    path: PathBuf,
    file: File,
    waiting: Vec<u8>,
    dropped: u64,
    is_failing: bool,
}

impl AppendFile {
    /// `file` is opened for appending.
    pub(super) fn new(path: PathBuf, file: File) -> Self {
        Self {
            path,
            file,
            waiting: Vec::new(),
            dropped: 0,
            is_failing: false,
        }
    }

    /// Appends a record, after those that are waiting. Warns once if it cannot be written.
    pub(super) fn append(&mut self, record: &[u8]) {
        match self.waiting.len() + record.len() > LARGEST {
            true => self.dropped += 1,
            false => self.waiting.extend(record),
        }
        self.flush();
    }

    /// Writes what is waiting for the last time.
    pub(super) fn finish(&mut self) {
        self.flush();
        if self.is_failing {
            tracing::warn!(
                "the end of `{}` could not be written and is lost; metrics.jsonl has the numbers",
                self.path.display()
            );
        }
    }

    fn flush(&mut self) {
        let written = self.write_waiting();
        let path = self.path.display();
        match written {
            Ok(()) if self.is_failing => {
                let lost = match self.dropped {
                    0 => "no record was lost".into(),
                    dropped => format!("{dropped} records were lost"),
                };
                tracing::warn!("`{path}` is writable again; {lost}");
                self.is_failing = false;
            }
            Ok(()) => {}
            Err(error) if !self.is_failing => {
                tracing::warn!(
                    "cannot write `{path}`: {error}; training continues, and the records are \
                    written as soon as possible"
                );
                self.is_failing = true;
            }
            Err(_) => {}
        }
    }

    /// A record may be written in parts: what is left of it is written first the next time.
    fn write_waiting(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            match self.file.write(&self.waiting) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_ends_nothing_and_keeps_what_is_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let full = File::options().append(true).open("/dev/full").unwrap();
        let mut file = AppendFile::new(path.clone(), full);
        file.append(b"one");
        file.append(b"two");
        assert!(file.is_failing && file.waiting == b"onetwo");
        file.file = File::create(&path).unwrap();
        file.append(b"three");
        assert!(!file.is_failing && file.waiting.is_empty());
        assert_eq!(std::fs::read(&path).unwrap(), b"onetwothree");
    }

    #[test]
    fn what_waits_has_a_limit() {
        let full = File::options().append(true).open("/dev/full").unwrap();
        let mut file = AppendFile::new("log".into(), full);
        file.append(&vec![0; LARGEST]);
        file.append(b"more");
        assert_eq!((file.waiting.len(), file.dropped), (LARGEST, 1));
    }
}
