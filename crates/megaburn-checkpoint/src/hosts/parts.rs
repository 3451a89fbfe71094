//! Sends chunks of files from ranks to ranks that ask for them.
//!
//! The receiver verifies which of the chunks that its host needs are there already, and asks for the
//! others. The sender reads their positions from the header of its own file, and sends the header
//! and the chunks. Each message has a position in the file and the bytes from there on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::Checkpoint,
    chunks::ChunkOfFile,
    error::{CheckpointError, IoContext},
    fetched::{fetched_path, remove_fetched},
    hosts::{
        map::Hosts,
        pairs::run_pairs,
        stream::{BLOCK, Sink, Streams},
    },
    needed::NeededChunks,
    safetensors_file::SafetensorsFile,
    tensor_bytes::TensorBytes,
};

/// Bytes of the position in a message.
const POSITION: usize = 8;

/// A file of which a rank sends chunks to another rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartTransfer {
    /// The file's number in the manifest.
    pub(crate) file: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Transfers of chunks of which each rank does its part.
pub(crate) struct PartTransfers<'a> {
    pub(crate) hosts: &'a Hosts,
    pub(crate) all: &'a [PartTransfer],
    /// The checkpoint, whose folder this rank reads from.
    pub(crate) checkpoint: &'a Checkpoint,
    /// The folder that this rank writes to.
    pub(crate) to: &'a Path,
    /// The chunks that this rank's host needs.
    pub(crate) needed: &'a NeededChunks,
}

impl PartTransfers<'_> {
    /// Sends and receives the chunks of this rank. What arrives is compared with its hash. Returns
    /// the bytes that this rank received from each rank.
    ///
    /// # Errors
    /// A file cannot be read or written here, or by the rank at the other end, or the hash of a
    /// chunk differs. All other files of this rank are transferred.
    /// # Collective
    /// All ranks that send or receive, at nearly the same time.
    pub(crate) fn run(&self, progress: &Progress) -> Result<BTreeMap<usize, u64>, CheckpointError> {
        let streams = Streams {
            hosts: self.hosts,
            progress,
            is_cancelled: &AtomicBool::new(false),
        };
        let me = self.hosts.files.rank();
        let ends = |transfer: &PartTransfer| (transfer.from, transfer.to);
        run_pairs(&self.hosts.files, self.all, ends, |transfer| {
            if transfer.from == me {
                self.send(transfer, streams).map(|()| 0)
            } else {
                self.receive(transfer, streams)
            }
        })
    }

    fn send(&self, transfer: &PartTransfer, streams: Streams<'_>) -> Result<(), CheckpointError> {
        let request = self.hosts.answers.recv(transfer.to, None, DType::U8)?;
        let wanted: BTreeSet<ChunkOfFile> = serde_json::from_slice(request.as_bytes())
            .expect("it was written by a rank of the same build");
        if wanted.is_empty() {
            return Ok(());
        }
        let info = &self.checkpoint.manifest.files[transfer.file];
        let path = self.checkpoint.path.join(&info.name);
        let opened = self.opened_ranges(transfer.file, &path, &wanted);
        let blocks = opened.map(|(file, ranges)| {
            let mut blocks = ranges.into_iter().flat_map(blocks_of);
            move || match blocks.next() {
                Some(block) => read_block(&file, block),
                None => Ok(Vec::new()),
            }
        });
        streams.send(transfer.to, &path, blocks)
    }

    /// Opens a file, and returns the ranges of its bytes that have its header and some chunks.
    fn opened_ranges(
        &self,
        file: usize,
        path: &Path,
        wanted: &BTreeSet<ChunkOfFile>,
    ) -> Result<(SafetensorsFile, Vec<Range<u64>>), CheckpointError> {
        let manifest = &self.checkpoint.manifest;
        let opened = SafetensorsFile::open(path)?;
        let mut ranges = Vec::with_capacity(wanted.len() + 1);
        ranges.push(0..opened.data_start());
        for &(piece, chunk) in wanted {
            let stored = self
                .checkpoint
                .stored(&opened, &manifest.files[file].pieces[piece])?;
            let len = manifest.chunk_bytes.unwrap_or(stored.len);
            let (start, end) = (chunk as u64 * len, (chunk as u64 + 1) * len);
            ranges.push(stored.start + start..stored.start + end.min(stored.len));
        }
        Ok((opened, joined(ranges)))
    }

    fn receive(
        &self,
        transfer: &PartTransfer,
        streams: Streams<'_>,
    ) -> Result<u64, CheckpointError> {
        let PartTransfer { file, from, .. } = *transfer;
        let info = &self.checkpoint.manifest.files[file];
        let path = fetched_path(self.to, &info.name);
        let none = BTreeSet::new();
        let needed = self.needed.of_file.get(&file).unwrap_or(&none);
        let progress = streams.progress;
        let missing = self
            .checkpoint
            .missing_chunks(file, &path, needed, progress)
            .or_else(|error| {
                let CheckpointError::Unreadable { source, .. } = error else {
                    return Err(error);
                };
                let shown = path.display();
                tracing::warn!("{shown} cannot be read ({source}), so it is fetched again");
                remove_fetched(self.to, &info.name)?;
                Ok(needed.clone())
            });
        // An empty request ends the transfer.
        let request = serde_json::to_vec(missing.as_ref().unwrap_or(&none))
            .expect("numbers are serializable");
        let len = request.len();
        let request = TensorData::from_bytes_vec(request, [len], DType::U8);
        self.hosts.answers.send(request, from)?;
        let missing = missing?;
        if missing.is_empty() {
            return Ok(0);
        }
        let parts = open(&path, info.bytes).map(|opened| Parts {
            file: opened,
            path: path.clone(),
            len: info.bytes,
            num_bytes: 0,
            from,
        });
        let parts = streams.receive(from, parts)?;
        let verified = self
            .checkpoint
            .verify_chunks(file, &path, &missing, progress);
        verified.map_err(|error| match error {
            CheckpointError::Damaged { file, why } => CheckpointError::Damaged {
                file,
                why: format!("{why}; rank {from} sent it"),
            },
            error => error,
        })?;
        Ok(parts.num_bytes)
    }
}

/// The file that chunks are written to, with its full length and with what it has already.
fn open(path: &Path, len: u64) -> Result<File, CheckpointError> {
    let mut options = File::options();
    let options = options.write(true).create(true).truncate(false);
    let file = options.open(path).during("create", path)?;
    if file.metadata().during("read", path)?.len() != len {
        file.set_len(len).during("set the length of", path)?;
    }
    Ok(file)
}

/// Sorts ranges and joins those that meet.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut all: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// Splits a range into ranges that each fit in a message.
fn blocks_of(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    let starts = range.step_by(BLOCK);
    starts.map(move |start| start..end.min(start + BLOCK as u64))
}

/// The position of a range of a file, and its bytes.
fn read_block(file: &SafetensorsFile, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
    let mut block = vec![0; POSITION + (range.end - range.start) as usize];
    block[..POSITION].copy_from_slice(&range.start.to_le_bytes());
    file.bytes().read_at(&mut block[POSITION..], range.start)?;
    Ok(block)
}

/// Chunks of a file that are being received.
struct Parts {
    file: File,
    path: PathBuf,
    /// The length of the file.
    len: u64,
    /// Bytes that arrived.
    num_bytes: u64,
    from: usize,
}

impl Sink for Parts {
    fn path(&self) -> &Path {
        &self.path
    }

    fn take(&mut self, block: &[u8]) -> Result<(), CheckpointError> {
        let (position, bytes) = block
            .split_first_chunk::<POSITION>()
            .expect("it was sent by a rank of the same build");
        let position = u64::from_le_bytes(*position);
        if position + bytes.len() as u64 > self.len {
            let why = format!(
                "rank {} has more than the {} bytes that were written",
                self.from, self.len
            );
            return Err(CheckpointError::damaged(&self.path, why));
        }
        let mut write = || {
            self.file.seek(SeekFrom::Start(position))?;
            self.file.write_all(bytes)
        };
        write().during("write", &self.path)?;
        self.num_bytes += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_meet_are_sent_as_one_in_blocks() {
        assert_eq!(joined(vec![8..10, 0..3, 3..7, 9..12]), [0..7, 8..12]);
        let block = BLOCK as u64;
        let blocks: Vec<_> = blocks_of(5..5 + 2 * block + 1).collect();
        let last = 5 + 2 * block;
        assert_eq!(blocks, [5..5 + block, 5 + block..last, last..last + 1]);
        assert_eq!(blocks_of(4..4).count(), 0);
    }
}
