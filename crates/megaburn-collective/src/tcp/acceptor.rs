//! The port at which the other ranks open connections to this one, for as long as the run lasts.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{endpoint::Endpoint, introductions::Callers, stack::STACK_BYTES};

/// The pause after a failure of the listener, or while too many callers are silent.
const PAUSE: Duration = Duration::from_millis(50);
/// How long this rank may take to accept its own call.
const WAKE: Duration = Duration::from_millis(500);

/// The thread that accepts callers.
#[derive(Debug)]
pub(super) struct Acceptor {
    address: SocketAddr,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Starts to accept the callers of `endpoint` at `listener`.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub(super) fn start(listener: TcpListener, endpoint: &Arc<Endpoint>) -> io::Result<Self> {
        listener.set_nonblocking(false)?;
        let address = listener.local_addr()?;
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let endpoint = endpoint.clone();
        let name = format!("rank-{}-accept", endpoint.rank);
        let accept = move || {
            let mut callers = Callers::new(move |caller| endpoint.answer(caller));
            while !over.load(Ordering::Relaxed) {
                if !matches!(callers.accept(&listener), Ok(true)) {
                    thread::sleep(PAUSE);
                }
            }
        };
        let thread = thread::Builder::new()
            .name(name)
            .stack_size(STACK_BYTES)
            .spawn(accept)?;
        Ok(Self {
            address,
            is_over,
            thread: Some(thread),
        })
    }
}

impl Drop for Acceptor {
    /// Closes the port.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let ip = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        // The thread waits for a caller. If it cannot be called, the port closes with the process.
        let woken = TcpStream::connect_timeout(&SocketAddr::new(ip, self.address.port()), WAKE);
        if woken.is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}
