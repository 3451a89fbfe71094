//! Sends bytes from a rank to another one in blocks, while the ranks' groups may be in use.

use std::{
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use burn::tensor::{DType, TensorData};
use megaburn_collective::Progress;

use crate::{error::CheckpointError, hosts::map::Hosts};

/// Bytes of a file in a message.
pub(crate) const BLOCK: usize = 4 << 20;

/// Messages of a stream that may be under way, which bounds the memory of its receiver.
const WINDOW: usize = 4;

/// The first byte of a message.
const DATA: u8 = 0;
const END: u8 = 1;
const FAILED: u8 = 2;

/// Where a receiver puts what arrives.
pub(crate) trait Sink {
    /// The file, for messages.
    fn path(&self) -> &Path;

    /// Takes the next block.
    fn take(&mut self, block: &[u8]) -> Result<(), CheckpointError>;
}

/// What all streams of a rank have in common.
#[derive(Clone, Copy)]
pub(crate) struct Streams<'a> {
    pub(crate) hosts: &'a Hosts,
    pub(crate) progress: &'a Progress,
    pub(crate) is_cancelled: &'a AtomicBool,
}

impl Streams<'_> {
    /// Sends blocks to a rank, which calls [`receive`](Self::receive). `blocks` returns the next
    /// block, which is empty at the end. `path` is what they are read from, for messages.
    ///
    /// # Errors
    /// An error of `blocks`, which the receiver gets too; a rank is gone.
    pub(crate) fn send(
        &self,
        to: usize,
        path: &Path,
        mut blocks: Result<impl FnMut() -> Result<Vec<u8>, CheckpointError>, CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let Hosts { files, answers, .. } = self.hosts;
        let (mut num_sent, mut num_answered) = (0, 0);
        let mut is_wanted = true;
        let answer = || -> Result<bool, CheckpointError> {
            let answer = answers.recv(to, Some(&[1]), DType::U8)?;
            Ok(answer.as_bytes() == [1])
        };
        let end = loop {
            while num_sent - num_answered >= WINDOW {
                is_wanted &= answer()?;
                num_answered += 1;
            }
            let read = match &mut blocks {
                Ok(_) if !is_wanted => Ok(Vec::new()),
                Ok(_) if self.is_cancelled.load(Ordering::Relaxed) => {
                    let path = path.to_path_buf();
                    Err(CheckpointError::Cancelled { path })
                }
                Ok(next) => next(),
                Err(_) => break blocks.map(drop),
            };
            match read {
                Ok(block) if block.is_empty() => break Ok(()),
                Ok(block) => {
                    self.progress.add(block.len() as u64);
                    files.send(message(DATA, &block), to)?;
                    num_sent += 1;
                }
                Err(error) => break Err(error),
            }
        };
        let last = match &end {
            Ok(()) => message(END, &[]),
            Err(error) => message(FAILED, error.to_string().as_bytes()),
        };
        files.send(last, to)?;
        for _ in num_answered..num_sent {
            answer()?;
        }
        end
    }

    /// Receives what a rank sends with [`send`](Self::send), and returns `sink` after the last
    /// block.
    ///
    /// # Errors
    /// The error of `sink`; an error of the sender; a rank is gone.
    pub(crate) fn receive<S: Sink>(
        &self,
        from: usize,
        mut sink: Result<S, CheckpointError>,
    ) -> Result<S, CheckpointError> {
        let Hosts { files, answers, .. } = self.hosts;
        loop {
            let message = files.recv(from, None, DType::U8)?;
            let bytes = message.as_bytes();
            match bytes[0] {
                DATA => {
                    self.progress.add(bytes.len() as u64);
                    sink = sink.and_then(|mut sink| {
                        if self.is_cancelled.load(Ordering::Relaxed) {
                            let path = sink.path().to_path_buf();
                            return Err(CheckpointError::Cancelled { path });
                        }
                        sink.take(&bytes[1..])?;
                        Ok(sink)
                    });
                    let answer = [u8::from(sink.is_ok())];
                    answers.send(TensorData::from(answer), from)?;
                }
                END => return sink,
                _ => {
                    return Err(CheckpointError::Peer {
                        rank: from,
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
