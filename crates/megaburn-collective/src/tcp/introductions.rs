//! Reads the introductions of callers concurrently, so that a silent caller does not block others.

use std::{
    collections::VecDeque,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use super::{
    socket::{self, Until},
    wire::{ControlMessage, Frame, read_frame},
};
use crate::clock;

/// A caller must introduce itself within this time.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of callers that are read at once. More wait in the system's queue.
const MOST: usize = 64;
/// While others wait, a caller that has been silent for this long is dropped. A rank introduces
/// itself as soon as it is connected.
const SILENT: Duration = Duration::from_secs(1);
/// The patience with a caller for which no thread can be created.
const INLINE: Duration = Duration::from_millis(200);

/// A caller and its first message.
#[derive(Debug)]
pub(super) struct Introduction {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) said: Result<ControlMessage, String>,
}

/// The callers at one port.
#[derive(Debug)]
pub(super) struct Introductions {
    done: Sender<(u64, Introduction)>,
    introduced: Receiver<(u64, Introduction)>,
    /// Callers that have sent nothing yet, the longest silent first.
    silent: VecDeque<Silent>,
    next_id: u64,
}

#[derive(Debug)]
struct Silent {
    id: u64,
    since: Instant,
    stream: TcpStream,
}

impl Introductions {
    pub(super) fn new() -> Self {
        let (done, introduced) = channel();
        Self {
            done,
            introduced,
            silent: VecDeque::new(),
            next_id: 0,
        }
    }

    /// Accepts the callers that wait at `listener`, up to the limit of [`MOST`].
    ///
    /// # Errors
    /// The listener fails.
    pub(super) fn accept(&mut self, listener: &TcpListener) -> Result<(), String> {
        while self.has_room() {
            let next =
                socket::accept(listener).map_err(|error| format!("cannot accept: {error}"))?;
            let Some((stream, from)) = next else {
                return Ok(());
            };
            let id = self.next_id;
            self.next_id += 1;
            if let Ok(stream) = stream.try_clone() {
                self.silent.push_back(Silent {
                    id,
                    since: clock::now(),
                    stream,
                });
            }
            self.listen_in_background(id, stream, from);
        }
        Ok(())
    }

    /// Reads on a thread or, if none can be created, here for a moment.
    fn listen_in_background(&self, id: u64, stream: TcpStream, from: SocketAddr) {
        let done = self.done.clone();
        let here = stream.try_clone();
        let introduce = move || {
            // The rendezvous may be over by now.
            let _ = done.send((id, listen(stream, from, PATIENCE)));
        };
        let spawned = thread::Builder::new()
            .name("introduction".into())
            .spawn(introduce);
        if let (Err(_), Ok(stream)) = (spawned, here) {
            let _ = self.done.send((id, listen(stream, from, INLINE)));
        }
    }

    /// Returns the next caller that introduced itself or failed to.
    pub(super) fn next(&mut self) -> Option<Introduction> {
        let (id, introduction) = self.introduced.try_recv().ok()?;
        self.silent.retain(|silent| silent.id != id);
        Some(introduction)
    }

    /// Whether another caller can be accepted. At the limit, drops the caller that has been silent
    /// longest, if it has been silent long enough.
    fn has_room(&mut self) -> bool {
        if self.silent.len() < MOST {
            return true;
        }
        let longest = self
            .silent
            .front()
            .filter(|silent| clock::now() - silent.since >= SILENT);
        let has_room = longest.is_some();
        if let Some(silent) = longest {
            // Its thread notices that the connection is closed.
            let _ = silent.stream.shutdown(Shutdown::Both);
            self.silent.pop_front();
        }
        has_room
    }
}

fn listen(stream: TcpStream, from: SocketAddr, patience: Duration) -> Introduction {
    let said = match read_frame(Until::new(&stream, clock::now() + patience)) {
        Ok(Some(Frame { word, .. })) => Ok(word),
        Ok(None) => Err("it disconnected without a message".to_string()),
        Err(error) => Err(match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                "it did not introduce itself".to_string()
            }
            _ => error.to_string(),
        }),
    };
    Introduction { stream, from, said }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::wire::write_frame;

    #[test]
    fn silent_callers_hold_up_nobody_however_many_they_are() {
        let listener = socket::listen("127.0.0.1", 0).unwrap();
        let address = listener.local_addr().unwrap();
        let call = || TcpStream::connect(address).unwrap();
        let silent: Vec<_> = (0..MOST + 10).map(|_| call()).collect();
        let rank = call();
        write_frame(&rank, &ControlMessage::Ready, 0, None).unwrap();
        let begin = clock::now();
        let mut introductions = Introductions::new();
        let found = loop {
            introductions.accept(&listener).unwrap();
            assert!(introductions.silent.len() <= MOST);
            match introductions.next() {
                Some(introduction) if introduction.said.is_ok() => break introduction,
                _ => thread::sleep(Duration::from_millis(5)),
            }
            assert!(
                clock::now() - begin < PATIENCE,
                "it waited for the silent ones"
            );
        };
        assert!(matches!(found.said, Ok(ControlMessage::Ready)));
        assert_eq!(found.stream.peer_addr().ok(), rank.local_addr().ok());
        drop(silent);
    }
}
