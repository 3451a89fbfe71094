use std::{
    io::ErrorKind,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    error::WatchError,
    http::{Request, Response},
    routes::answer,
    runs::Runs,
};

/// The most connections that are served at the same time; a browser opens six.
const MOST_CONNECTIONS: usize = 64;
/// How long a connection may be idle.
const PATIENCE: Duration = Duration::from_secs(20);

/// Serves the page of some runs over HTTP.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    host: String,
    runs: Arc<Runs>,
}

impl Server {
    /// Listens on a port of an address or a name of this host; port 0 is any free port.
    ///
    /// # Errors
    /// The port is in use, or `host` is not of this host.
    pub fn bind(host: &str, port: u16, runs: Runs) -> Result<Self, WatchError> {
        let fail = |source: std::io::Error| match source.kind() {
            ErrorKind::AddrInUse => WatchError::PortInUse {
                host: host.to_string(),
                port,
            },
            _ => WatchError::Listen {
                host: host.to_string(),
                port,
                source,
            },
        };
        let listener = TcpListener::bind((host, port)).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        Ok(Self {
            listener,
            address,
            host: host.to_string(),
            runs: Arc::new(runs),
        })
    }

    /// Also answers requests that call this host by a name.
    #[must_use]
    pub fn with_name(mut self, name: String) -> Self {
        self.host = name;
        self
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves on threads of their own until the process ends.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn spawn(self) -> Result<(), WatchError> {
        let thread = thread::Builder::new().name("watch".into());
        let spawned = thread.spawn(move || self.serve());
        spawned
            .map(drop)
            .map_err(|source| WatchError::Thread { source })
    }

    fn serve(self) {
        let open = Arc::new(AtomicUsize::new(0));
        let host: Arc<str> = self.host.into();
        for stream in self.listener.incoming() {
            // A connection that was closed before it was accepted, or too many open files: the page
            // asks again.
            let Ok(stream) = stream else {
                thread::sleep(Duration::from_millis(50));
                continue;
            };
            let (runs, host, counted) = (self.runs.clone(), host.clone(), Counted::of(&open));
            // The connection is closed, and the page asks again.
            if counted.is_too_many() {
                continue;
            }
            let connection = move || {
                serve_one(stream, &runs, &host);
                drop(counted);
            };
            // Without a thread the connection is closed, and the page asks again.
            let _ = thread::Builder::new()
                .name("watch".into())
                .spawn(connection);
        }
    }
}

/// A connection that is counted as long as it is open.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn of(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(open.clone())
    }

    fn is_too_many(&self) -> bool {
        self.0.load(Ordering::Relaxed) > MOST_CONNECTIONS
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers the one request of a connection. A connection that fails is dropped: the page asks
/// again.
fn serve_one(mut stream: TcpStream, runs: &Runs, host: &str) {
    let patience = Some(PATIENCE);
    if stream.set_read_timeout(patience).is_err() || stream.set_write_timeout(patience).is_err() {
        return;
    }
    let Ok(request) = Request::read(&mut stream, Instant::now() + PATIENCE) else {
        return;
    };
    let (response, request) = match request {
        Ok(None) => return,
        Err(response) => (response, None),
        Ok(Some(request)) => {
            let response = if request.is_for_this_host(host) {
                answer(&request, runs)
            } else {
                let why = "open the page as localhost, by an address, or by the name of `--host`";
                Response::error(403, why)
            };
            (response, Some(request))
        }
    };
    if response.write(&mut stream, request.as_ref()).is_ok() {
        let _ = stream.shutdown(Shutdown::Write);
    }
}
