//! A connection, which several threads of a rank write to.

use std::{
    net::{Shutdown, TcpStream},
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    socket::Until,
    wire::{ControlMessage, write_frame},
};
use crate::{clock, fault::Channel, message::Payload};

/// A connection to another rank.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) stream: TcpStream,
    /// Held while writing; true once a frame was cut short, after which no other frame can follow.
    torn: Mutex<bool>,
    /// Whether everything that the peer sent has been read.
    has_ended: AtomicBool,
}

impl Line {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            torn: Mutex::new(false),
            has_ended: AtomicBool::new(false),
        }
    }

    /// Records that the connection has ended and nothing more will be read.
    pub(super) fn end_reading(&self) {
        self.has_ended.store(true, Ordering::Release);
    }

    /// Whether nothing more will be read.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, bool> {
        self.torn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(
        &self,
        torn: &mut bool,
        until: Until<'_>,
        word: &ControlMessage,
        channel: Channel,
        payload: Option<&Payload>,
    ) -> Result<(), (usize, std::io::Error)> {
        if *torn {
            return Err((0, std::io::ErrorKind::BrokenPipe.into()));
        }
        let result = write_frame(until, word, channel, payload);
        *torn = result.as_ref().is_err_and(|(written, _)| *written > 0);
        result
    }

    /// Sends a last message. If that fails, shuts the connection down, which the peer notices as
    /// well.
    pub(super) fn last_word(&self, word: &ControlMessage, deadline: Instant) {
        if !self.say(word, deadline) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends a message without a payload; returns false if the connection did not accept it in
    /// time.
    pub(super) fn say(&self, word: &ControlMessage, deadline: Instant) -> bool {
        loop {
            match self.torn.try_lock() {
                Ok(mut torn) => {
                    let until = Until::new(&self.stream, deadline);
                    return self.write(&mut torn, until, word, 0, None).is_ok();
                }
                Err(TryLockError::Poisoned(_)) => return false,
                Err(TryLockError::WouldBlock) if clock::now() >= deadline => return false,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}
