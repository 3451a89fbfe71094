//! Sockets with deadlines, and the resolution of addresses.

use std::{
    io::{self, ErrorKind, IoSlice, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use socket2::{SockRef, TcpKeepalive};

use crate::{clock, error::CollectiveError};

/// How often a wait at a socket checks whether it should end.
pub(super) const TICK: Duration = Duration::from_millis(5);
/// The same interval while a peer's full buffer blocks a write.
const WRITE_TICK: Duration = Duration::from_millis(100);

/// A stream whose reads and writes end at a deadline, or when `stop` returns true.
pub(super) struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> Until<'a> {
    pub(super) fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self {
            stream,
            deadline,
            stop: &|| false,
        }
    }

    pub(super) fn or(self, stop: &'a dyn Fn() -> bool) -> Self {
        Self { stop, ..self }
    }

    /// The timeout of the next system call. Zero would mean forever.
    fn patience(&self) -> Option<Duration> {
        let left = self.deadline.saturating_duration_since(clock::now());
        Some(left.clamp(Duration::from_millis(1), WRITE_TICK))
    }

    /// Whether to retry a failed call. In a process that was suspended, calls are interrupted even
    /// without a signal handler.
    fn again(&self, error: &io::Error) -> bool {
        use ErrorKind::{Interrupted, TimedOut, WouldBlock};
        matches!(error.kind(), WouldBlock | TimedOut | Interrupted)
            && clock::now() < self.deadline
            && !(self.stop)()
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(self.patience())?;
            match self.stream.read(buffer) {
                Err(error) if self.again(&error) => {}
                result => return result,
            }
        }
    }
}

impl Write for Until<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            self.stream.set_write_timeout(self.patience())?;
            match self.stream.write_vectored(buffers) {
                Err(error) if self.again(&error) => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What can be read from a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Nothing,
    Data,
    Closed,
}

/// Checks without blocking and without consuming data.
pub(super) fn pending(stream: &TcpStream) -> Pending {
    let peeked = stream
        .set_nonblocking(true)
        .and_then(|()| stream.peek(&mut [0]));
    if stream.set_nonblocking(false).is_err() {
        return Pending::Closed;
    }
    match peeked {
        Ok(0) => Pending::Closed,
        Ok(_) => Pending::Data,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Pending::Nothing
        }
        Err(_) => Pending::Closed,
    }
}

/// A host that does not acknowledge data for this long has vanished.
const VANISHED: Duration = Duration::from_secs(60);

/// Disables Nagle's algorithm and detects a host that vanished within a minute: by keepalive while
/// nothing is sent, by the user timeout (`TCP_USER_TIMEOUT`) while data is in flight.
///
/// There is no user timeout within a host. Its kernel cannot vanish alone, and the timeout would
/// break the connections of a job that is suspended in the middle of a large message: a suspended
/// reader with a full buffer looks like one that acknowledges nothing.
pub(super) fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(20))
        .with_interval(Duration::from_secs(5));
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    {
        let mine = stream.local_addr()?.ip();
        let theirs = stream.peer_addr()?.ip();
        let same_host =
            mine.to_canonical() == theirs.to_canonical() || theirs.to_canonical().is_loopback();
        socket.set_tcp_user_timeout(if same_host { None } else { Some(VANISHED) })?;
    }
    Ok(())
}

/// Accepts the next connection, if one is waiting.
pub(super) fn accept(listener: &TcpListener) -> io::Result<Option<(TcpStream, SocketAddr)>> {
    match listener.accept() {
        Ok((stream, from)) => {
            stream.set_nonblocking(false)?;
            tune(&stream)?;
            Ok(Some((stream, from)))
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(None)
        }
        // The connection ended before it was accepted.
        Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(None),
        // No descriptor or memory is left; strangers may hold them for a few seconds.
        Err(error) if is_shortage(&error) => {
            tracing::warn!("cannot accept a connection yet: {error}");
            thread::sleep(SHORTAGE);
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The pause before a retry when descriptors or memory are short.
const SHORTAGE: Duration = Duration::from_millis(200);

fn is_shortage(error: &io::Error) -> bool {
    #[cfg(unix)]
    {
        use nix::errno::Errno::{self, EMFILE, ENFILE, ENOBUFS, ENOMEM};
        let errno = error.raw_os_error().map(Errno::from_raw);
        errno.is_some_and(|errno| [EMFILE, ENFILE, ENOBUFS, ENOMEM].contains(&errno))
    }
    #[cfg(not(unix))]
    {
        error.kind() == ErrorKind::OutOfMemory
    }
}

/// The number of callers that wait at a listener; the system may allow fewer.
const BACKLOG: i32 = 4096;

/// A non-blocking listener on which others reach this host under `name`. It binds exactly this
/// address if `name` is an address (or `localhost`), and every interface if it is a host name,
/// because a host often resolves its own name to another address than the others do.
pub(super) fn listen(name: &str, port: u16) -> Result<TcpListener, CollectiveError> {
    let everywhere = [
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    ];
    let mut hosts = match name.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) if name == "localhost" => resolve(name, port).unwrap_or_default(),
        Err(_) => Vec::new(),
    };
    // An address that is not this host's own (it is forwarded) can only be served on all
    // interfaces.
    hosts.extend(everywhere);
    let mut last = None;
    for host in hosts {
        match TcpListener::bind((host, port)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            // All ranks may call at once; those that do not fit would wait for a second.
            SockRef::from(&listener).listen(BACKLOG)?;
            Ok(listener)
        }) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let address = SocketAddr::new(host, port).to_string();
                return Err(CollectiveError::AddressInUse { address });
            }
            Err(error) => last = Some((host, error)),
        }
    }
    let (host, error) = last.expect("at least two addresses were tried");
    Err(rendezvous(format!(
        "cannot listen at {}: {error}",
        SocketAddr::new(host, port)
    )))
}

/// Connects to any address of `name`, retrying until `deadline` or until `give_up` returns true for
/// an error.
pub(super) fn dial(
    name: &str,
    port: u16,
    deadline: Instant,
    give_up: &dyn Fn(&io::Error) -> bool,
) -> Result<TcpStream, String> {
    let mut pause = Duration::from_millis(10);
    loop {
        let error = match dial_once(name, port, deadline) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if clock::now() + pause >= deadline || give_up(&error) {
            return Err(error.to_string());
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn dial_once(name: &str, port: u16, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for host in resolve(name, port)? {
        let left = deadline.saturating_duration_since(clock::now());
        let patience = left.clamp(Duration::from_millis(1), Duration::from_secs(10));
        match TcpStream::connect_timeout(&SocketAddr::new(host, port), patience) {
            // On the same host, connecting to a port without a listener can connect a socket to
            // itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => {
                tune(&stream)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn resolve(name: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    let mut hosts: Vec<IpAddr> = (name, port).to_socket_addrs()?.map(|at| at.ip()).collect();
    hosts.dedup();
    Ok(hosts)
}

/// A port of this host that is free now. It is chosen below the range of ephemeral ports, and
/// differently by every call, so that it most likely stays free.
///
/// # Errors
/// No port is free.
pub fn free_port() -> io::Result<u16> {
    const FIRST: u16 = 12_000;
    const COUNT: u16 = 20_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = std::process::id().wrapping_mul(7_919);
    for _ in 0..COUNT {
        let step = u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + (start.wrapping_add(step) % u32::from(COUNT)) as u16;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return Ok(port);
        }
    }
    Err(ErrorKind::AddrInUse.into())
}

pub(super) fn rendezvous(why: impl Into<String>) -> CollectiveError {
    CollectiveError::Rendezvous { why: why.into() }
}
