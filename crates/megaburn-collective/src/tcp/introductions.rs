//! Reads the introductions of callers concurrently, so that a silent caller does not block others.

use std::{
    collections::VecDeque,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    socket::{self, Until},
    stack::STACK_BYTES,
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

/// Handles a caller that introduced itself or failed to, on the thread that read its introduction.
type Handler = dyn Fn(Introduction) + Send + Sync;

/// The callers at one port.
pub(super) struct Callers {
    handle: Arc<Handler>,
    silent: SilentCallers,
    next_id: u64,
}

/// Callers that have sent nothing yet, the longest silent first.
type SilentCallers = Arc<Mutex<VecDeque<Silent>>>;

#[derive(Debug)]
struct Silent {
    id: u64,
    since: Instant,
    stream: TcpStream,
}

impl Callers {
    pub(super) fn new(handle: impl Fn(Introduction) + Send + Sync + 'static) -> Self {
        Self {
            handle: Arc::new(handle),
            silent: SilentCallers::default(),
            next_id: 0,
        }
    }

    /// Accepts one caller at `listener`, if there is one and no more than [`MOST`] are silent.
    /// Returns whether there was one.
    ///
    /// # Errors
    /// The listener fails.
    pub(super) fn accept(&mut self, listener: &TcpListener) -> Result<bool, String> {
        if !self.has_room() {
            return Ok(false);
        }
        let next = socket::accept(listener).map_err(|error| format!("cannot accept: {error}"))?;
        let Some((stream, from)) = next else {
            return Ok(false);
        };
        let id = self.next_id;
        self.next_id += 1;
        if let Ok(stream) = stream.try_clone() {
            let since = clock::now();
            lock(&self.silent).push_back(Silent { id, since, stream });
        }
        self.listen_in_background(id, stream, from);
        Ok(true)
    }

    /// Reads on a thread or, if none can be created, here for a moment.
    fn listen_in_background(&self, id: u64, stream: TcpStream, from: SocketAddr) {
        let here = stream.try_clone();
        let introduce = |handle: Arc<Handler>, silent: SilentCallers, patience| {
            move |stream| {
                let introduction = listen(stream, from, patience);
                lock(&silent).retain(|silent| silent.id != id);
                handle(introduction);
            }
        };
        let read = introduce(self.handle.clone(), self.silent.clone(), PATIENCE);
        let spawned = thread::Builder::new()
            .name("introduction".into())
            .stack_size(STACK_BYTES)
            .spawn(move || read(stream));
        if let (Err(_), Ok(stream)) = (spawned, here) {
            introduce(self.handle.clone(), self.silent.clone(), INLINE)(stream);
        }
    }

    /// Whether another caller can be accepted. At the limit, drops the caller that has been silent
    /// longest, if it has been silent long enough.
    fn has_room(&self) -> bool {
        let mut silent = lock(&self.silent);
        if silent.len() < MOST {
            return true;
        }
        let is_long = |silent: &Silent| clock::now() - silent.since >= SILENT;
        let has_room = silent.front().is_some_and(is_long);
        if has_room && let Some(longest) = silent.pop_front() {
            // Its thread notices that the connection is closed.
            let _ = longest.stream.shutdown(Shutdown::Both);
        }
        has_room
    }
}

fn lock(silent: &SilentCallers) -> MutexGuard<'_, VecDeque<Silent>> {
    silent.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The callers at one port, one after the other.
pub(super) struct Introductions {
    callers: Callers,
    introduced: Receiver<Introduction>,
}

impl Introductions {
    pub(super) fn new() -> Self {
        let (done, introduced) = channel();
        // The rendezvous may be over when a caller introduces itself.
        let callers = Callers::new(move |introduction| drop(done.send(introduction)));
        Self {
            callers,
            introduced,
        }
    }

    /// Accepts the callers that wait at `listener`, up to the limit of [`MOST`].
    ///
    /// # Errors
    /// The listener fails.
    pub(super) fn accept(&mut self, listener: &TcpListener) -> Result<(), String> {
        while self.callers.accept(listener)? {}
        Ok(())
    }

    /// Returns the next caller that introduced itself or failed to.
    pub(super) fn next(&mut self) -> Option<Introduction> {
        self.introduced.try_recv().ok()
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
            assert!(lock(&introductions.callers.silent).len() <= MOST);
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
