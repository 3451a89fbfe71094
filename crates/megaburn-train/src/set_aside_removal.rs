//! Removes the run that `--fresh` set aside, while training continues.

use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};

use crate::run_folder::RunFolder;

/// The thread that removes what was set aside. Dropping this waits for it.
#[derive(Debug)]
pub(crate) struct SetAsideRemoval {
    /// `None` if no thread could be started, and this thread has done the work.
    thread: Option<JoinHandle<()>>,
}

impl SetAsideRemoval {
    /// Starts [`RunFolder::discard_set_aside`].
    pub(crate) fn start(folder: &Arc<RunFolder>) -> Self {
        let own = folder.clone();
        let started = thread::Builder::new()
            .name("set-aside-removal".into())
            .spawn(move || own.discard_set_aside());
        if started.is_err() {
            folder.discard_set_aside();
        }
        Self {
            thread: started.ok(),
        }
    }
}

impl Drop for SetAsideRemoval {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic has printed its message, and the next start finds what is left.
            let _ = thread.join();
        }
    }
}
