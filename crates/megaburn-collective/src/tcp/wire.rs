//! The messages of ranks over a connection, and their encoding.
//!
//! A frame is a header of 24 bytes (magic, length of the control message, length of the payload,
//! channel; little-endian), the control message as JSON, and the payload as raw bytes.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use serde::{Deserialize, Serialize};

use super::token::JobToken;
use crate::{call::Call, fault::Channel, message::Payload, transport::TimeoutProbe};

/// Ranks with another protocol version are refused.
pub(super) const VERSION: u32 = 5;

const MAGIC: [u8; 4] = *b"mgbn";
const HEADER: usize = 24;
/// The limit on a control message: longer than a table of many thousand addresses.
const LONGEST_WORD: usize = 8 << 20;
/// A payload's memory is allocated in steps of this size as it arrives, since the size in the
/// header cannot be trusted.
const STEP: usize = 64 << 20;

/// All messages that a rank can send.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ControlMessage {
    /// To rank 0: the caller's identity, and the port on which it accepts the others.
    Hello(Hello),
    /// From rank 0: it is still waiting for these ranks.
    Missing { ranks: Vec<usize> },
    /// From rank 0, every second: it is still waiting.
    Waiting,
    /// From rank 0, when all have arrived.
    Place(Place),
    /// Along the tree of all ranks: the addresses of all.
    Table(Table),
    /// The introduction of one rank to another.
    Peer {
        token: JobToken,
        nonce: u64,
        from: usize,
        to: usize,
    },
    /// The answer to an introduction: the connection is kept.
    Welcome,
    /// The answer to an introduction: there is another connection between the two ranks.
    Taken,
    /// To rank 0: the sender is connected to the ranks next to it.
    Ready,
    /// From rank 0: all ranks are ready.
    Go,
    /// A rank cannot take part.
    Refused { why: String },
    /// From rank 0: a rank cannot start, so the run cannot start.
    CannotStart(StartFailure),
    /// A message of a collective; its contribution is the payload.
    Data(Call),
    /// A question or answer about a wait that took too long.
    TimeoutProbe(TimeoutProbe),
    /// Rank `by` failed first.
    Abort {
        by: usize,
        reason: String,
        is_hang: bool,
    },
    /// Rank `rank` ended out of order first.
    Lost { rank: usize, why: String },
    /// The sender has received an [`Abort`](Self::Abort) or [`Lost`](Self::Lost).
    Heard,
    /// The sender finished.
    Leave,
    /// Along the tree of all ranks: a rank finished and left.
    Left { rank: usize },
}

/// A rank's introduction to rank 0.
///
/// Fields that other versions lack get defaults, so that another version is refused as such instead
/// of failing to parse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: u32,
    #[serde(default)]
    pub(super) token: JobToken,
    #[serde(default)]
    pub(super) build: String,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) seed: u64,
    pub(super) port: u16,
    /// The sender's host, and how many ranks were started there, if it knows.
    #[serde(default)]
    pub(super) host: String,
    #[serde(default)]
    pub(super) on_host: Option<usize>,
    /// Why it cannot start, if it only connected to report that.
    #[serde(default)]
    pub(super) failure: Option<StartFailure>,
}

/// Why a rank cannot start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartFailure {
    pub(super) rank: usize,
    pub(super) why: String,
    /// The exit code of its process.
    pub(super) code: i32,
}

/// A rank's place in the tree of all ranks.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Place {
    /// Distinguishes this run's connections from other runs'.
    pub(super) nonce: u64,
    /// Where the rank above listens.
    pub(super) above: Address,
}

/// The addresses on which the ranks listen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Table {
    /// By rank.
    pub(super) peers: Vec<Address>,
}

/// Where a rank listens. No address means the rank is on rank 0's host, at the address under which
/// the reader reached rank 0.
pub(super) type Address = (Option<std::net::IpAddr>, u16);

/// A control message with its payload.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) word: ControlMessage,
    pub(super) channel: Channel,
    pub(super) payload: Vec<u8>,
}

/// Writes a frame; on failure reports how many bytes were written.
pub(super) fn write_frame(
    mut to: impl Write,
    word: &ControlMessage,
    channel: Channel,
    payload: Option<&Payload>,
) -> Result<(), (usize, io::Error)> {
    let payload = payload.map(Payload::as_slice).unwrap_or_default();
    let word = serde_json::to_vec(word).map_err(|error| (0, error.into()))?;
    let mut head = Vec::with_capacity(HEADER + word.len());
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&(word.len() as u32).to_le_bytes());
    head.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    head.extend_from_slice(&channel.to_le_bytes());
    head.extend_from_slice(&word);
    let mut slices = [IoSlice::new(&head), IoSlice::new(payload)];
    let mut slices = &mut slices[..];
    let mut written = 0;
    while !slices.is_empty() {
        match to.write_vectored(slices) {
            Ok(0) => return Err((written, ErrorKind::WriteZero.into())),
            Ok(count) => {
                written += count;
                IoSlice::advance_slices(&mut slices, count);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((written, error)),
        }
    }
    Ok(())
}

/// Reads a frame; `None` if the connection ended before one began.
pub(super) fn read_frame(mut from: impl Read) -> io::Result<Option<Frame>> {
    let mut header = [0; HEADER];
    loop {
        match from.read(&mut header[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    from.read_exact(&mut header[1..4])?;
    if header[..4] != MAGIC {
        return Err(invalid("it does not speak megaburn's protocol"));
    }
    from.read_exact(&mut header[4..])?;
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
    let word_len = u32::from_le_bytes(header[4..8].try_into().expect("4 bytes")) as usize;
    let payload_len = number(8);
    let channel = number(16);
    if word_len > LONGEST_WORD {
        return Err(invalid("its control message is too long"));
    }
    let word = read_bytes(&mut from, word_len as u64)?;
    let word = serde_json::from_slice(&word).map_err(|error| invalid(&error.to_string()))?;
    if payload_len > 0 && !matches!(word, ControlMessage::Data(_)) {
        return Err(invalid("a control message carries an unexpected payload"));
    }
    let payload = read_bytes(&mut from, payload_len)?;
    Ok(Some(Frame {
        word,
        channel,
        payload,
    }))
}

fn read_bytes(from: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len.min(STEP as u64) as usize);
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Bytes, DType};

    use super::*;
    use crate::call::Collective;

    fn written(payload: &[u8]) -> Vec<u8> {
        let call = Call {
            op: Collective::AllGather,
            seq: 7,
            dtype: DType::U8,
            shape: vec![3, 0],
        };
        let payload = Payload::new(Bytes::from_bytes_vec(payload.to_vec()));
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &ControlMessage::Data(call), 99, Some(&payload)).unwrap();
        bytes
    }

    #[test]
    fn frames_come_back_one_after_the_other() {
        let both = [written(&[1, 2, 3]), written(&[])].concat();
        let mut from = both.as_slice();
        let first = read_frame(&mut from).unwrap().unwrap();
        assert_eq!(
            (first.channel, first.payload.as_slice()),
            (99, &[1, 2, 3][..])
        );
        assert!(
            matches!(first.word, ControlMessage::Data(call) if call.seq == 7 && call.shape == [3, 0])
        );
        assert!(read_frame(&mut from).unwrap().unwrap().payload.is_empty());
        assert!(read_frame(&mut from).unwrap().is_none());
    }

    /// A stream whose every other read is interrupted.
    struct Interrupted<'a>(&'a [u8], bool);

    impl Read for Interrupted<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                Err(ErrorKind::Interrupted.into())
            } else {
                self.0.read(buffer)
            }
        }
    }

    #[test]
    fn a_read_that_is_interrupted_goes_on() {
        let frame = read_frame(Interrupted(&written(&[1, 2, 3]), false))
            .unwrap()
            .unwrap();
        assert_eq!(frame.payload, [1, 2, 3]);
    }

    #[test]
    fn a_frame_cut_anywhere_is_an_error() {
        let whole = written(&[1, 2, 3]);
        for cut in 1..whole.len() {
            let error = read_frame(&whole[..cut]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "cut at {cut}");
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        assert!(read_frame(&b"GET / HTTP/1.1\r\n\r\n"[..]).is_err());
        let mut long = written(&[]);
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read_frame(long.as_slice()).is_err());
        let mut boasting = written(&[5]);
        boasting[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(read_frame(boasting.as_slice()).is_err());
    }
}
