//! Sends whole files from ranks to ranks, while the ranks' groups may be in use.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use megaburn_collective::Progress;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    error::{CheckpointError, IoContext},
    hex::hex,
    hosts::{
        map::Hosts,
        pairs::run_pairs,
        stream::{BLOCK, Sink, Streams},
    },
    manifest::FileInfo,
    paths::PART,
};

/// Bytes that are written between syncs. At the end of a file, a sync of all of it would take long
/// without a sign of life.
const SYNC: usize = 256 << 20;

/// A file that a rank sends to another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Transfer {
    pub(crate) file: String,
    pub(crate) bytes: u64,
    xxh3: String,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Transfer {
    pub(crate) fn new(file: &FileInfo, from: usize, to: usize) -> Self {
        Self {
            file: file.name.clone(),
            bytes: file.bytes,
            xxh3: file.xxh3.clone(),
            from,
            to,
        }
    }
}

/// Transfers of which each rank does its part.
pub(crate) struct Transfers<'a> {
    pub(crate) hosts: &'a Hosts,
    pub(crate) all: &'a [Transfer],
    /// The folders that this rank reads from and writes to.
    pub(crate) from: &'a Path,
    pub(crate) to: &'a Path,
}

impl Transfers<'_> {
    /// Sends and receives the files of this rank. What arrives is compared with the hash in the
    /// manifest before it gets its name. Returns the bytes that this rank received from each rank.
    ///
    /// # Errors
    /// A file cannot be read or written here, or by the rank at the other end. All other files of
    /// this rank are transferred.
    /// # Collective
    /// All ranks that send or receive, at nearly the same time.
    pub(crate) fn run(
        &self,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<BTreeMap<usize, u64>, CheckpointError> {
        let streams = Streams {
            hosts: self.hosts,
            progress,
            is_cancelled,
        };
        let me = self.hosts.files.rank();
        let ends = |transfer: &Transfer| (transfer.from, transfer.to);
        run_pairs(&self.hosts.files, self.all, ends, |transfer| {
            if transfer.from == me {
                self.send(transfer, streams).map(|()| 0)
            } else {
                let received = Received::create(self.to, transfer);
                let received = streams.receive(transfer.from, received)?;
                received.finish(transfer).map(|()| transfer.bytes)
            }
        })
    }

    fn send(&self, transfer: &Transfer, streams: Streams<'_>) -> Result<(), CheckpointError> {
        let path = self.from.join(&transfer.file);
        let file = File::open(&path).during_read(&path);
        let blocks = file.map(|mut file| {
            let path = &path;
            move || read_block(&mut file).during_read(path)
        });
        streams.send(transfer.to, &path, blocks)
    }
}

/// The next bytes of a file, as many as a message has; none at its end.
fn read_block(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut block = Vec::with_capacity(BLOCK);
    file.take(BLOCK as u64).read_to_end(&mut block)?;
    Ok(block)
}

/// A file that is being received. It is removed if it is dropped before it has its name.
struct Received {
    path: PathBuf,
    part: PathBuf,
    file: File,
    hash: Xxh3,
    unsynced: usize,
    is_finished: bool,
}

impl Received {
    fn create(folder: &Path, transfer: &Transfer) -> Result<Self, CheckpointError> {
        let path = folder.join(&transfer.file);
        let part = folder.join(format!("{}{PART}", transfer.file));
        let file = File::create(&part).during("create", &part)?;
        Ok(Self {
            path,
            part,
            file,
            hash: Xxh3::new(),
            unsynced: 0,
            is_finished: false,
        })
    }

    fn finish(mut self, transfer: &Transfer) -> Result<(), CheckpointError> {
        let found = hex(self.hash.digest());
        if found != transfer.xxh3 {
            let why = format!(
                "its xxh3 is {found} as rank {} sent it, but {} was written",
                transfer.from, transfer.xxh3
            );
            return Err(CheckpointError::damaged(&self.path, why));
        }
        self.file.sync_all().during("sync", &self.part)?;
        fs::rename(&self.part, &self.path).during("rename", &self.part)?;
        self.is_finished = true;
        Ok(())
    }
}

impl Sink for Received {
    fn path(&self) -> &Path {
        &self.path
    }

    fn take(&mut self, block: &[u8]) -> Result<(), CheckpointError> {
        self.hash.update(block);
        self.unsynced += block.len();
        self.file.write_all(block).during("write", &self.part)?;
        if self.unsynced >= SYNC {
            self.unsynced = 0;
            self.file.sync_data().during("sync", &self.part)?;
        }
        Ok(())
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if !self.is_finished {
            // The error that ends the transfer is the one to report.
            let _ = fs::remove_file(&self.part);
        }
    }
}
