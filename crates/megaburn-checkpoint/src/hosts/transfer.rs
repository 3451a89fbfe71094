//! Sends files from ranks to ranks, while the ranks' groups may be in use.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    error::{CheckpointError, IoContext},
    hex::hex,
    hosts::map::Hosts,
    manifest::FileInfo,
    paths::PART,
};

/// Bytes of a file in a message.
const BLOCK: usize = 4 << 20;

/// Messages of a file that may be under way, which bounds the memory of its receiver.
const WINDOW: usize = 4;

/// Pairs of ranks for which a rank works at a time.
const AT_ONCE: usize = 8;

/// The name of the threads that do so.
const NAME: &str = "checkpoint-transfer";

/// Bytes that are written between syncs. At the end of a file, a sync of all of it would take long
/// without a sign of life.
const SYNC: usize = 256 << 20;

/// The first byte of a message.
const DATA: u8 = 0;
const END: u8 = 1;
const FAILED: u8 = 2;

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
    /// Sends and receives the files of this rank. A thread works for each pair of ranks, for at most
    /// [`AT_ONCE`] pairs at a time, in an order that all ranks agree on. What arrives is compared with
    /// the hash in the manifest before it gets its name.
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
    ) -> Result<(), CheckpointError> {
        let me = self.hosts.files.rank();
        let mut pairs: BTreeMap<(usize, usize), Vec<&Transfer>> = BTreeMap::new();
        for transfer in self.all {
            if transfer.from == me || transfer.to == me {
                let pair = (transfer.from, transfer.to);
                pairs.entry(pair).or_default().push(transfer);
            }
        }
        let one_pair = |(from, _): (usize, usize), transfers: Vec<&Transfer>| {
            let mut failed = Ok(());
            for transfer in transfers {
                let done = if from == me {
                    self.send(transfer, progress, is_cancelled)
                } else {
                    self.receive(transfer, progress, is_cancelled)
                };
                match done {
                    Err(error @ CheckpointError::Collective(_)) => return Err(error),
                    done => failed = failed.and(done),
                }
            }
            failed
        };
        let num_threads = pairs.len().min(AT_ONCE);
        // The first pair that is left has both of its ranks, so no rank waits for ever.
        let left = Mutex::new(pairs.into_iter());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            let mut failed = Ok(());
            while let Some((pair, transfers)) = next() {
                match one_pair(pair, transfers) {
                    Err(error @ CheckpointError::Collective(_)) => return Err(error),
                    done => failed = failed.and(done),
                }
            }
            failed
        };
        thread::scope(|scope| {
            let spawn = |_| {
                let builder = thread::Builder::new().name(NAME.into());
                builder.spawn_scoped(scope, work)
            };
            let threads: Vec<_> = (0..num_threads).map(spawn).collect();
            let ends = threads.into_iter().map(|thread| match thread {
                Ok(thread) => thread
                    .join()
                    .unwrap_or(Err(CheckpointError::Panicked { thread: NAME })),
                Err(source) => Err(CheckpointError::NoThread { source }),
            });
            // All threads end before the first error is returned.
            ends.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn send(
        &self,
        transfer: &Transfer,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<(), CheckpointError> {
        let Hosts { files, answers, .. } = self.hosts;
        let path = self.from.join(&transfer.file);
        let mut file = File::open(&path).during_read(&path);
        let (mut num_sent, mut num_answered) = (0, 0);
        let mut is_wanted = true;
        let answer = || -> Result<bool, CheckpointError> {
            let answer = answers.recv(transfer.to, Some(&[1]), DType::U8)?;
            Ok(answer.as_bytes() == [1])
        };
        let end = loop {
            while num_sent - num_answered >= WINDOW {
                is_wanted &= answer()?;
                num_answered += 1;
            }
            let read = match &mut file {
                Ok(_) if !is_wanted => Ok(Vec::new()),
                Ok(_) if is_cancelled.load(Ordering::Relaxed) => {
                    Err(CheckpointError::Cancelled { path: path.clone() })
                }
                Ok(file) => read_block(file).during_read(&path),
                Err(_) => break file.map(drop),
            };
            match read {
                Ok(block) if block.is_empty() => break Ok(()),
                Ok(block) => {
                    progress.add(block.len() as u64);
                    files.send(message(DATA, &block), transfer.to)?;
                    num_sent += 1;
                }
                Err(error) => break Err(error),
            }
        };
        let last = match &end {
            Ok(()) => message(END, &[]),
            Err(error) => message(FAILED, error.to_string().as_bytes()),
        };
        files.send(last, transfer.to)?;
        for _ in num_answered..num_sent {
            answer()?;
        }
        end
    }

    fn receive(
        &self,
        transfer: &Transfer,
        progress: &Progress,
        is_cancelled: &AtomicBool,
    ) -> Result<(), CheckpointError> {
        let Hosts { files, answers, .. } = self.hosts;
        let mut received = Received::create(self.to, transfer);
        loop {
            let message = files.recv(transfer.from, None, DType::U8)?;
            let bytes = message.as_bytes();
            match bytes[0] {
                DATA => {
                    progress.add(bytes.len() as u64);
                    received = received.and_then(|mut file| {
                        if is_cancelled.load(Ordering::Relaxed) {
                            let path = file.path.clone();
                            return Err(CheckpointError::Cancelled { path });
                        }
                        file.write(&bytes[1..])?;
                        Ok(file)
                    });
                    let answer = [u8::from(received.is_ok())];
                    answers.send(TensorData::from(answer), transfer.from)?;
                }
                END => return received?.finish(transfer),
                _ => {
                    return Err(CheckpointError::Peer {
                        rank: transfer.from,
                        message: String::from_utf8_lossy(&bytes[1..]).into_owned(),
                        is_damage: false,
                        is_not_finite: false,
                    });
                }
            }
        }
    }
}

fn message(kind: u8, bytes: &[u8]) -> TensorData {
    let mut message = Vec::with_capacity(bytes.len() + 1);
    message.push(kind);
    message.extend_from_slice(bytes);
    let len = message.len();
    TensorData::from_bytes_vec(message, [len], DType::U8)
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

    fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.hash.update(bytes);
        self.unsynced += bytes.len();
        self.file.write_all(bytes).during("write", &self.part)?;
        if self.unsynced >= SYNC {
            self.unsynced = 0;
            self.file.sync_data().during("sync", &self.part)?;
        }
        Ok(())
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

impl Drop for Received {
    fn drop(&mut self) {
        if !self.is_finished {
            // The error that ends the transfer is the one to report.
            let _ = fs::remove_file(&self.part);
        }
    }
}
