//! What the threads of a rank share: its open connections, its mailbox, and where the others are.
//!
//! The connections along the tree of all ranks ([`crate::tree`]) are opened at the start. The
//! first message between two other ranks opens theirs. If both open one at the same time, they keep
//! the connection that the higher rank opened.

use std::{
    collections::{HashMap, HashSet},
    io::ErrorKind,
    net::{IpAddr, TcpStream},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq;

use super::{
    flood_progress::Flood,
    introductions::Introduction,
    line::Line,
    socket::{self, Until},
    stack::STACK_BYTES,
    token::JobToken,
    wire::{Address, ControlMessage, Frame, Table, read_frame, write_frame},
};
use crate::{
    activity::Activity, clock, mailbox::Mailbox, message::Message, options::GroupOptions, tree,
};

/// A rank at whose port nothing listens for this long has ended.
const CLOSED: Duration = Duration::from_millis(300);
/// A connection that the other rank is opening at the same time arrives within this time.
const THEIRS: Duration = Duration::from_secs(1);
/// How often a wait for a connection checks whether it should end.
const LOOK: Duration = Duration::from_millis(20);
/// How long a rank may take to accept a short message.
const SHORT: Duration = Duration::from_secs(2);

/// One rank of a world.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) mailbox: Mailbox<Message>,
    pub(super) activity: Arc<Activity>,
    pub(super) flood: Flood,
    options: GroupOptions,
    pass: Pass,
    /// The address under which this rank reaches rank 0.
    home: IpAddr,
    /// By rank.
    addresses: OnceLock<Vec<Address>>,
    is_leaving: AtomicBool,
    lines: Mutex<Lines>,
    opened: Condvar,
}

/// What a caller must know.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) token: JobToken,
    /// Distinguishes this run's connections from other runs'.
    pub(super) nonce: u64,
}

#[derive(Debug, Default)]
struct Lines {
    /// By rank. The connection of a rank that has left stays here.
    open: HashMap<usize, Arc<Line>>,
    /// The ranks that this rank is calling.
    calling: HashSet<usize>,
}

/// The end of a call.
enum Called {
    Open(Arc<Line>),
    /// The other rank's own call is kept.
    Theirs,
}

impl Endpoint {
    pub(super) fn new(
        (rank, world_size): (usize, usize),
        options: GroupOptions,
        pass: Pass,
        home: IpAddr,
    ) -> Arc<Self> {
        Arc::new(Self {
            rank,
            world_size,
            mailbox: Mailbox::default(),
            activity: Activity::new(rank, options),
            flood: Flood::default(),
            options,
            pass,
            home,
            addresses: OnceLock::new(),
            is_leaving: AtomicBool::new(false),
            lines: Mutex::default(),
            opened: Condvar::new(),
        })
    }

    /// How long a rank waits for another without a sign of life.
    pub(super) fn patience(&self) -> Duration {
        self.options.timeout
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns where all ranks listen; the first answer counts.
    pub(super) fn learn(&self, addresses: Vec<Address>) {
        // The table of another world would name ranks that do not exist.
        if addresses.len() == self.world_size {
            let _ = self.addresses.set(addresses);
            drop(self.lock());
            self.opened.notify_all();
        }
    }

    /// Passes the addresses of all ranks on to the ranks below this one. Returns the ranks below that
    /// are not connected yet, if it could not because of them or because it does not know the
    /// addresses itself.
    ///
    /// # Errors
    /// A rank accepts nothing.
    pub(super) fn pass_on_addresses(&self) -> Result<Option<Vec<usize>>, String> {
        let below: Vec<_> = tree::children(self.rank, self.world_size)
            .map(|rank| (rank, self.open_line(rank)))
            .collect();
        let missing: Vec<_> = below
            .iter()
            .filter(|(_, line)| line.is_none())
            .map(|(rank, _)| *rank)
            .collect();
        let Some(peers) = self.addresses.get().filter(|_| missing.is_empty()) else {
            return Ok(Some(missing));
        };
        let peers = peers.clone();
        let word = ControlMessage::Table(Table { peers });
        for (rank, line) in below {
            if line.is_some_and(|line| !line.say(&word, clock::now() + SHORT)) {
                return Err(format!("rank {rank} left while connecting"));
            }
        }
        Ok(None)
    }

    /// Whether this rank knows all others, and so takes part in the run.
    pub(super) fn has_started(&self) -> bool {
        self.addresses.get().is_some()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// From now on, connections may end and no other is opened.
    pub(super) fn begin_leaving(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether `rank` is next to this one in the tree of all ranks.
    pub(super) fn is_neighbour(&self, rank: usize) -> bool {
        tree::are_neighbours(self.rank, rank)
    }

    /// The ranks next to this one in the tree.
    pub(super) fn neighbours(&self) -> impl Iterator<Item = usize> {
        tree::neighbours(self.rank, self.world_size)
    }

    /// The connection to `rank`, if there is one.
    pub(super) fn open_line(&self, rank: usize) -> Option<Arc<Line>> {
        self.lock().open.get(&rank).cloned()
    }

    /// All connections.
    pub(super) fn open_lines(&self) -> Vec<(usize, Arc<Line>)> {
        let lines = self.lock();
        let mut open: Vec<_> = lines
            .open
            .iter()
            .map(|(rank, line)| (*rank, line.clone()))
            .collect();
        open.sort_by_key(|(rank, _)| *rank);
        open
    }

    /// Whether this rank is calling `rank` at the moment.
    pub(super) fn is_calling(&self, rank: usize) -> bool {
        self.lock().calling.contains(&rank)
    }

    /// Returns the connection to `to`, and opens it if there is none.
    ///
    /// # Errors
    /// It cannot be opened until `deadline`, `stop` ends the wait, or `to` has ended.
    pub(super) fn line(
        self: &Arc<Self>,
        to: usize,
        deadline: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Arc<Line>, String> {
        let known = self.addresses.get();
        let Some(&address) = known.and_then(|addresses| addresses.get(to)) else {
            return match self.open_line(to) {
                Some(line) => Ok(line),
                None => Err("its address is not known".into()),
            };
        };
        self.line_to(to, address, deadline, stop)
    }

    /// As [`Self::line`], to a rank that listens at `address`.
    pub(super) fn line_to(
        self: &Arc<Self>,
        to: usize,
        address: Address,
        deadline: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Arc<Line>, String> {
        let mut patience = Duration::ZERO;
        loop {
            let until = deadline.min(clock::now() + patience);
            if let Some(line) = self.await_line(to, until, stop)? {
                return Ok(line);
            }
            let called = self.call(to, address, deadline, stop);
            let theirs = {
                let mut lines = self.lock();
                lines.calling.remove(&to);
                lines.open.get(&to).cloned()
            };
            self.opened.notify_all();
            match (called, theirs) {
                (Ok(Called::Open(line)), _) | (_, Some(line)) => return Ok(line),
                (Ok(Called::Theirs), None) => patience = THEIRS,
                (Err(why), None) => return Err(why),
            }
        }
    }

    /// Waits until `until` for the connection to `to`; and longer, as long as another thread calls
    /// `to`. `None`: this thread is to call.
    fn await_line(
        &self,
        to: usize,
        until: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Arc<Line>>, String> {
        let mut lines = self.lock();
        loop {
            if let Some(line) = lines.open.get(&to) {
                return Ok(Some(line.clone()));
            }
            if stop() {
                return Err("the wait for a connection was ended".into());
            }
            if clock::now() >= until && lines.calling.insert(to) {
                return Ok(None);
            }
            let waited = self.opened.wait_timeout(lines, LOOK);
            lines = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn call(
        self: &Arc<Self>,
        to: usize,
        (host, port): Address,
        deadline: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Called, String> {
        let host = host.unwrap_or(self.home);
        let failed = |why: String| format!("cannot connect to rank {to} at {host} {port}: {why}");
        let closed = clock::now() + CLOSED;
        let give_up = |error: &std::io::Error| {
            let is_closed = error.kind() == ErrorKind::ConnectionRefused && clock::now() >= closed;
            is_closed || stop()
        };
        let stream = socket::dial(&host.to_string(), port, deadline, &give_up).map_err(failed)?;
        let word = ControlMessage::Peer {
            token: self.pass.token.clone(),
            nonce: self.pass.nonce,
            from: self.rank,
            to,
        };
        let until = || Until::new(&stream, deadline).or(stop);
        write_frame(until(), &word, 0, None).map_err(|(_, error)| failed(error.to_string()))?;
        let word = match read_frame(until()) {
            Ok(Some(Frame { word, .. })) => word,
            Ok(None) => return Err(failed("it closed the connection".into())),
            Err(error) => return Err(failed(error.to_string())),
        };
        match word {
            ControlMessage::Welcome => {}
            ControlMessage::Taken => return Ok(Called::Theirs),
            ControlMessage::Refused { why } => return Err(failed(why)),
            other => return Err(failed(format!("it sent an unexpected message: {other:?}"))),
        }
        let line = self
            .add(to, stream)
            .map_err(|error| failed(error.to_string()))?;
        Ok(Called::Open(line))
    }

    /// Adds a connection and starts the thread that reads it.
    pub(super) fn add(
        self: &Arc<Self>,
        rank: usize,
        stream: TcpStream,
    ) -> std::io::Result<Arc<Line>> {
        stream.set_read_timeout(None)?;
        let line = Arc::new(Line::new(stream));
        let (endpoint, reading) = (self.clone(), line.clone());
        thread::Builder::new()
            .name(format!("rank-{}-from-{rank}", self.rank))
            .stack_size(STACK_BYTES)
            .spawn(move || endpoint.read(rank, &reading))?;
        self.lock().open.insert(rank, line.clone());
        Ok(line)
    }

    /// Answers a caller at this rank's port, on the thread that read its introduction. If it is a
    /// rank of this run, the thread reads what it sends until the connection ends.
    pub(super) fn answer(self: &Arc<Self>, caller: Introduction) {
        let Introduction { stream, from, said } = caller;
        // A leaving rank calls itself, to close its port.
        if self.is_leaving() {
            return;
        }
        let Some(rank) = self.identify(&said) else {
            tracing::warn!(
                "rank {}: refused an unknown connection from {from}",
                self.rank
            );
            let why = "it does not belong to this run: it did not show the run's job token".into();
            let until = Until::new(&stream, clock::now() + SHORT);
            let _ = write_frame(until, &ControlMessage::Refused { why }, 0, None);
            return;
        };
        let line = Arc::new(Line::new(stream));
        // Nothing else may be sent before the answer.
        let mut torn = line.lock();
        let is_taken = {
            let mut lines = self.lock();
            // This rank may have begun to leave meanwhile.
            let is_taken = self.is_leaving()
                || lines.open.contains_key(&rank)
                || lines.calling.contains(&rank) && self.rank > rank;
            if !is_taken {
                lines.open.insert(rank, line.clone());
            }
            is_taken
        };
        let word = if is_taken {
            ControlMessage::Taken
        } else {
            ControlMessage::Welcome
        };
        let until = Until::new(&line.stream, clock::now() + SHORT);
        let _ = line.write(&mut torn, until, &word, 0, None);
        drop(torn);
        self.opened.notify_all();
        if !is_taken {
            // A connection that cannot be set up is one that ends.
            let _ = line.stream.set_read_timeout(None);
            self.read(rank, &line);
        }
    }

    /// Identifies the calling rank; `None` for a stranger.
    fn identify(&self, said: &Result<ControlMessage, String>) -> Option<usize> {
        let Ok(ControlMessage::Peer {
            token,
            nonce,
            from,
            to,
        }) = said
        else {
            return None;
        };
        let is_ours: bool = nonce.ct_eq(&self.pass.nonce).into();
        let is_rank = *to == self.rank && *from != self.rank && *from < self.world_size;
        (token.agrees(&self.pass.token) && is_ours && is_rank).then_some(*from)
    }
}

#[cfg(test)]
mod tests;
