use std::{io::BufReader, net::Shutdown, sync::Arc, time::Duration};

use burn::tensor::Bytes;

use super::{
    endpoint::Endpoint,
    line::Line,
    wire::{ControlMessage, Frame, Table, read_frame},
};
use crate::{
    clock,
    message::{Message, Payload},
    transport::TimeoutProbe,
};

/// How long a send may take for a message that no rank waits for.
pub(super) const AT_ONCE: Duration = Duration::from_millis(100);
/// Why a rank that has left cannot be waited for.
const LEFT: &str = "it finished and left";
const READ_BUFFER: usize = 64 << 10;

impl Endpoint {
    /// Puts what rank `from` sends into the mailbox until the connection ends. Answers questions for
    /// this rank, whose main thread may be busy.
    pub(super) fn read(self: &Arc<Self>, from: usize, line: &Arc<Line>) {
        let why = self.read_to_end(from, line);
        line.end_reading();
        // A leaving rank closes its connections, and the others close theirs.
        if self.is_leaving() || self.mailbox.has_left(from) {
            return;
        }
        let word = ControlMessage::Lost {
            rank: from,
            why: why.clone(),
        };
        self.spread(word, None);
        self.mailbox.die(from, &why);
    }

    /// Returns how the connection ended.
    fn read_to_end(self: &Arc<Self>, from: usize, line: &Arc<Line>) -> String {
        let mut reader = BufReader::with_capacity(READ_BUFFER, &line.stream);
        loop {
            let Frame {
                word,
                channel,
                payload,
            } = match read_frame(&mut reader) {
                Ok(Some(frame)) => frame,
                Ok(None) => {
                    return "its connection closed without a message; it may have been killed"
                        .into();
                }
                Err(error) => return format!("its connection ended: {error}"),
            };
            match word {
                ControlMessage::Data(call) => {
                    let payload = Payload::new(Bytes::from_bytes_vec(payload));
                    self.mailbox
                        .deliver(from, channel, Message { call, payload });
                }
                ControlMessage::TimeoutProbe(probe) => self.heed(from, line, probe),
                ControlMessage::Heard => self.flood.heard(from),
                word @ (ControlMessage::Abort { .. } | ControlMessage::Lost { .. }) => {
                    line.say(&ControlMessage::Heard, clock::now() + AT_ONCE);
                    self.hear_of_failure(from, word);
                }
                ControlMessage::Leave => {
                    self.mailbox.leave(from, LEFT);
                    // The peer waits for this half of the connection to close, as proof that
                    // everything was read.
                    let _ = line.stream.shutdown(Shutdown::Write);
                    if self.is_neighbour(from) {
                        self.pass_on_end(from, from);
                    }
                }
                ControlMessage::Left { rank } => {
                    if rank != self.rank && !self.mailbox.has_left(rank) {
                        self.mailbox.leave(rank, LEFT);
                        self.pass_on_end(rank, from);
                    }
                }
                ControlMessage::Table(Table { peers }) => self.learn(peers),
                other => return format!("it sent an unexpected message: {other:?}"),
            }
        }
    }

    /// Passes a failure on before this rank's own threads hear of it: they end the process.
    fn hear_of_failure(self: &Arc<Self>, from: usize, word: ControlMessage) {
        let word = match word {
            ControlMessage::Lost { rank, why } if rank == self.rank => ControlMessage::Abort {
                by: from,
                reason: format!("it lost its connection to rank {rank}: {why}"),
                is_hang: false,
            },
            word => word,
        };
        self.spread(word.clone(), Some(from));
        match word {
            ControlMessage::Lost { rank, why } => self.mailbox.die(rank, &why),
            ControlMessage::Abort {
                by,
                reason,
                is_hang,
            } => self.mailbox.abort(by, &reason, is_hang),
            _ => {}
        }
    }

    fn heed(&self, from: usize, line: &Line, probe: TimeoutProbe) {
        match probe {
            TimeoutProbe::Question => match self.activity.busy() {
                Some(busy) => {
                    let answer = ControlMessage::TimeoutProbe(TimeoutProbe::Busy(busy));
                    line.say(&answer, clock::now() + AT_ONCE);
                }
                None => self.mailbox.ask(from),
            },
            TimeoutProbe::AlsoWaiting => self.mailbox.answer(from),
            TimeoutProbe::Busy(busy) => self.mailbox.answer_busy(from, busy),
        }
    }

    /// Passes on along the tree that `rank` finished and left, as rank `from` said. It had sent
    /// everything before, and what it sent had been read.
    ///
    /// A rank that has left passes on nothing any more, so some ranks may not hear of it; they find
    /// its port closed when they wait for it.
    fn pass_on_end(&self, rank: usize, from: usize) {
        if self.is_leaving() {
            return;
        }
        let others = self
            .neighbours()
            .filter(|other| ![rank, from].contains(other));
        for other in others.filter(|other| !self.mailbox.has_left(*other)) {
            if let Some(line) = self.open_line(other) {
                line.say(&ControlMessage::Left { rank }, clock::now() + AT_ONCE);
            }
        }
    }
}
