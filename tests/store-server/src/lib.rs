//! A small HTTP server with faults. It answers the requests of S3 that megaburn sends: for ranges of
//! objects, lists, uploads in parts, and deletions.

mod fault;
mod request;
mod state;

use std::io::{self, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

pub use fault::Fault;
pub use request::Request;
use state::{Answered, State};

/// A server on a port of this host, for as long as the process runs.
#[derive(Clone, Debug)]
pub struct Server {
    /// Its URL.
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Starts a server without objects.
    ///
    /// # Panics
    /// The host has no free port.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("the port of a listener");
        let state = State {
            has_tags: true,
            page: 1000,
            ..State::default()
        };
        let server = Self {
            address: format!("http://{address}"),
            state: Arc::new(Mutex::new(state)),
        };
        let serving = server.clone();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let serving = serving.clone();
                // A client that hangs up ends its thread.
                thread::spawn(move || serving.serve(connection));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an object at a path such as `/dir/web.bin`.
    pub fn put(&self, path: &str, bytes: &[u8]) {
        self.state().put(path, bytes);
    }

    /// The bytes of an object.
    pub fn object(&self, path: &str) -> Option<Vec<u8>> {
        self.state()
            .objects
            .get(path)
            .map(|(bytes, _)| bytes.to_vec())
    }

    /// The paths of all objects.
    pub fn paths(&self) -> Vec<String> {
        self.state().objects.keys().cloned().collect()
    }

    /// Number of uploads that were neither completed nor aborted.
    pub fn num_uploads(&self) -> usize {
        self.state().uploads.len()
    }

    /// Forgets all uploads in progress, as a rule of the bucket may do.
    pub fn forget_uploads(&self) {
        self.state().uploads.clear();
    }

    /// Sends at most this many objects in one answer to a list.
    pub fn with_page(self, page: usize) -> Self {
        self.state().page = page;
        self
    }

    /// Sends no ETags, only the time.
    pub fn without_tags(&self) {
        self.state().has_tags = false;
    }

    /// Adds a fault for one of the next requests to a path that ends so.
    pub fn fail(&self, ending: &str, fault: Fault) {
        self.state().faults.push_back((ending.into(), fault));
    }

    /// Sets the fault of the request that arrives after `num_requests` others.
    pub fn fail_after(&self, num_requests: usize, fault: Fault) {
        self.state().later = Some((num_requests, fault));
    }

    /// The requests so far, which are forgotten.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    /// Number of faults that no request met.
    pub fn num_faults(&self) -> usize {
        let state = self.state();
        state.faults.len() + usize::from(state.later.is_some())
    }

    fn serve(&self, connection: TcpStream) -> Option<()> {
        // Otherwise the end of an answer waits for the client to confirm its beginning.
        connection.set_nodelay(true).ok()?;
        let mut reader = BufReader::new(connection.try_clone().ok()?);
        loop {
            let request = Request::read(&mut reader)?;
            self.answer(&connection, &request)?;
        }
    }

    /// `None` ends the connection.
    fn answer(&self, to: &TcpStream, request: &Request) -> Option<()> {
        let is_head = request.method == "HEAD";
        let fault = {
            let mut state = self.state();
            state.requests.push(request.clone());
            state.fault(&request.path)
        };
        match fault {
            Some(Fault::Status(status)) => {
                return plain(to, is_head, (status, None, "<Code>Busy</Code>".into()));
            }
            Some(Fault::Inside) => {
                let text = "<Error><Code>InternalError</Code></Error>".into();
                return plain(to, is_head, (200, None, text));
            }
            Some(Fault::Silence) => return self.keep(to),
            _ => {}
        }
        let changed = self.state().change(request);
        match (changed, fault) {
            (_, Some(Fault::Lost)) => None,
            (Some(answered), _) => plain(to, is_head, answered),
            (None, _) => self.send(to, request, fault),
        }
    }

    /// Sends an object or a part of it.
    fn send(&self, mut to: &TcpStream, request: &Request, fault: Option<Fault>) -> Option<()> {
        let is_head = request.method == "HEAD";
        let (object, tag) = {
            let state = self.state();
            let found = state.objects.get(&request.path).cloned();
            let Some((object, tag)) = found else {
                return plain(to, is_head, (404, None, "<Code>NoSuchKey</Code>".into()));
            };
            (object, Some(tag).filter(|_| state.has_tags))
        };
        let size = object.len() as u64;
        let asked = request.range.clone();
        let range = asked.filter(|_| fault != Some(Fault::NoRange));
        if range.as_ref().is_some_and(|range| range.start >= size) {
            return plain(to, is_head, (416, None, "<Code>InvalidRange</Code>".into()));
        }
        let mut head = match &range {
            Some(range) => {
                let (begin, last) = (range.start, range.end.min(size) - 1);
                format!(
                    "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {begin}-{last}/{size}\r\n"
                )
            }
            None => "HTTP/1.1 200 OK\r\n".into(),
        };
        if let Some(tag) = tag {
            head += &format!("ETag: {tag}\r\n");
        }
        head += "Last-Modified: Thu, 26 Nov 2026 10:00:00 GMT\r\n";
        let range = range.map_or(0..size, |range| range.start..range.end.min(size));
        let body = &object[range.start as usize..range.end as usize];
        let half = &body[..body.len() / 2];
        let long = [body, body].concat();
        // A complete answer, whose `Content-Range` may say something else.
        let sent = match fault {
            Some(Fault::Short) if !is_head => half,
            Some(Fault::Long) if !is_head => &long,
            _ => body,
        };
        head += &format!("Content-Length: {}\r\n\r\n", sent.len());
        to.write_all(head.as_bytes()).ok()?;
        match fault {
            _ if is_head => Some(()),
            Some(Fault::Stall) => {
                to.write_all(half).ok()?;
                self.keep(to)
            }
            Some(Fault::Reset) => {
                to.write_all(half).ok()?;
                None
            }
            _ => to.write_all(sent).ok(),
        }
    }

    /// Keeps a connection open on which nothing more is sent.
    fn keep(&self, connection: &TcpStream) -> Option<()> {
        let kept = connection.try_clone().ok()?;
        self.state().stalled.push(kept);
        None
    }
}

/// Sends a small answer.
fn plain(mut to: &TcpStream, is_head: bool, (status, tag, text): Answered) -> Option<()> {
    let length = text.len();
    let text = if is_head { "" } else { &text };
    let tag = tag.map_or_else(String::new, |tag| format!("ETag: {tag}\r\n"));
    let answer = format!("HTTP/1.1 {status} X\r\n{tag}Content-Length: {length}\r\n\r\n{text}");
    let sent: io::Result<()> = to.write_all(answer.as_bytes());
    sent.ok()
}
