//! Syncs a file to disk while more is written to it.

use std::{
    fs::File,
    io,
    thread::{self, JoinHandle},
};

/// The thread's name.
const NAME: &str = "checkpoint-sync";

/// The sync of a file that is in progress, if any. Dropping it waits.
#[derive(Debug, Default)]
pub(super) struct BackgroundSync {
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl BackgroundSync {
    /// Waits for the last sync, and starts one of what has been written to `file` since. If no
    /// thread can be started, this thread syncs.
    ///
    /// # Errors
    /// The last sync failed, or this one if no thread could be started.
    pub(super) fn start(&mut self, file: &File) -> io::Result<()> {
        self.wait()?;
        let Ok(own) = file.try_clone() else {
            return file.sync_data();
        };
        let started = thread::Builder::new()
            .name(NAME.into())
            .spawn(move || own.sync_data());
        match started {
            Ok(thread) => self.thread = Some(thread),
            Err(_) => file.sync_data()?,
        }
        Ok(())
    }

    /// Waits for the last sync.
    ///
    /// # Errors
    /// It failed.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        let panicked = |_| {
            let why = format!("the thread `{NAME}` panicked");
            Err(io::Error::other(why))
        };
        thread.join().unwrap_or_else(panicked)
    }
}

impl Drop for BackgroundSync {
    fn drop(&mut self) {
        // The file is given up, so its fault is of no use.
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn a_failed_sync_is_reported_once_by_the_next_call() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("file")).unwrap();
        // A pipe cannot be synced.
        let (_reader, writer) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(writer));
        for starts_another in [false, true] {
            let mut sync = BackgroundSync::default();
            sync.wait().unwrap();
            sync.start(&file).unwrap();
            sync.start(&pipe).unwrap();
            let failed = match starts_another {
                true => sync.start(&file),
                false => sync.wait(),
            };
            assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::InvalidInput);
            sync.wait().unwrap();
            sync.start(&file).unwrap();
        }
    }
}
