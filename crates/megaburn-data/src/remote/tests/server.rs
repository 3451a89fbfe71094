//! A small HTTP server with faults.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

/// What a server does wrong in one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It answers with this status.
    Status(u16),
    /// It sends half of the body and then nothing, with the connection open.
    Stall,
    /// It reads the request and answers nothing.
    Silence,
    /// It closes the connection in the middle of the body.
    Reset,
    /// It sends half of the body as if that were all.
    Short,
    /// It sends more than was asked for.
    Long,
    /// It sends the whole object.
    NoRange,
}

/// A request as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) range: Option<Range<u64>>,
    pub(super) is_signed: bool,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, (Arc<[u8]>, String)>,
    /// Faults of the next requests to paths that end so.
    faults: VecDeque<(String, Fault)>,
    requests: Vec<Request>,
    /// Connections that stall, which are kept open.
    stalled: Vec<TcpStream>,
    has_tags: bool,
    num_versions: u64,
}

/// A server on a port of this host, for as long as the process runs.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = State {
            has_tags: true,
            ..State::default()
        };
        let server = Self {
            address,
            state: Arc::new(Mutex::new(state)),
        };
        let serving = server.clone();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (serving, connection) = (serving.clone(), connection.unwrap());
                // A client that hangs up ends its thread.
                thread::spawn(move || serving.serve(connection));
            }
        });
        server
    }

    /// Puts an object at a path such as `/dir/web.bin`.
    pub(super) fn put(&self, path: &str, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap();
        state.num_versions += 1;
        let tag = format!("\"v{}\"", state.num_versions);
        state.objects.insert(path.into(), (bytes.into(), tag));
    }

    /// Sends no ETags, only the time.
    pub(super) fn without_tags(&self) {
        self.state.lock().unwrap().has_tags = false;
    }

    /// Adds a fault for one of the next requests to a path that ends so.
    pub(super) fn fail(&self, ending: &str, fault: Fault) {
        let mut state = self.state.lock().unwrap();
        state.faults.push_back((ending.into(), fault));
    }

    /// The requests so far, which are forgotten.
    pub(super) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    /// Number of faults that no request met.
    pub(super) fn num_faults(&self) -> usize {
        self.state.lock().unwrap().faults.len()
    }

    fn serve(&self, connection: TcpStream) -> Option<()> {
        // Otherwise the end of an answer waits for the client to confirm its beginning.
        connection.set_nodelay(true).ok()?;
        let mut reader = BufReader::new(connection.try_clone().ok()?);
        loop {
            let request = read_request(&mut reader)?;
            let (object, tag, fault) = {
                let mut state = self.state.lock().unwrap();
                state.requests.push(request.clone());
                let path = &request.path;
                let at = state.faults.iter().position(|(end, _)| path.ends_with(end));
                let fault = at.and_then(|at| state.faults.remove(at));
                let found = state.objects.get(path).cloned();
                let tag = found.as_ref().map(|(_, tag)| tag.clone());
                let tag = tag.filter(|_| state.has_tags);
                (
                    found.map(|(bytes, _)| bytes),
                    tag,
                    fault.map(|(_, fault)| fault),
                )
            };
            self.answer(&connection, &request, object, tag, fault)?;
        }
    }

    /// `None` ends the connection.
    fn answer(
        &self,
        mut to: &TcpStream,
        request: &Request,
        object: Option<Arc<[u8]>>,
        tag: Option<String>,
        fault: Option<Fault>,
    ) -> Option<()> {
        let is_head = request.method == "HEAD";
        let mut plain = |status: u16, text: &str| {
            let length = text.len();
            let text = if is_head { "" } else { text };
            write!(
                to,
                "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{text}"
            )
            .ok()
        };
        match fault {
            Some(Fault::Status(status)) => return plain(status, "<Code>Busy</Code>"),
            Some(Fault::Silence) => return self.keep(to),
            _ => {}
        }
        let Some(object) = object else {
            return plain(404, "<Code>NoSuchKey</Code>");
        };
        let size = object.len() as u64;
        let range = request
            .range
            .clone()
            .filter(|_| fault != Some(Fault::NoRange));
        if range.as_ref().is_some_and(|range| range.start >= size) {
            return plain(416, "<Code>InvalidRange</Code>");
        }
        let mut head = match &range {
            Some(range) => {
                let end = range.end.min(size);
                format!(
                    "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {}-{}/{size}\r\n",
                    range.start,
                    end - 1
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
        let ended = |sent: std::io::Result<()>| sent.ok();
        match fault {
            Some(Fault::Short | Fault::Long) if !is_head => {
                // A complete answer, whose `Content-Range` says something else.
                let long = [body, body].concat();
                let body = if fault == Some(Fault::Short) {
                    half
                } else {
                    &long
                };
                head += &format!("Content-Length: {}\r\n\r\n", body.len());
                ended(to.write_all(head.as_bytes()))?;
                ended(to.write_all(body))
            }
            _ => {
                head += &format!("Content-Length: {}\r\n\r\n", body.len());
                ended(to.write_all(head.as_bytes()))?;
                match fault {
                    _ if is_head => Some(()),
                    Some(Fault::Stall) => {
                        ended(to.write_all(half))?;
                        self.keep(to)
                    }
                    Some(Fault::Reset) => {
                        ended(to.write_all(half))?;
                        None
                    }
                    _ => ended(to.write_all(body)),
                }
            }
        }
    }

    /// Keeps a connection open on which nothing more is sent.
    fn keep(&self, connection: &TcpStream) -> Option<()> {
        let kept = connection.try_clone().ok()?;
        self.state.lock().unwrap().stalled.push(kept);
        None
    }
}

/// Starts a server that only greets its clients, with a certificate that no host trusts
/// (`tests/tools/tls.sh`), and returns its port.
pub(super) fn start_tls() -> u16 {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tls");
    let certificate = fs::read(fixtures.join("cert.der")).unwrap().into();
    let key = fs::read(fixtures.join("key.der"))
        .unwrap()
        .try_into()
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let mut greeting = rustls::ServerConnection::new(config.clone()).unwrap();
            // The client refuses the certificate.
            let _ = greeting.complete_io(&mut connection.unwrap());
        }
    });
    port
}

/// A path without `%`: some clients write every `/` and `.` of a name so.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap().to_owned();
    for part in parts {
        text.push(u8::from_str_radix(&part[..2], 16).unwrap().into());
        text += &part[2..];
    }
    text
}

fn read_request(from: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    from.read_line(&mut line).ok().filter(|count| *count > 0)?;
    let mut words = line.split_whitespace();
    let method = words.next()?.into();
    let path = decoded(words.next()?);
    let mut request = Request {
        method,
        path,
        range: None,
        is_signed: false,
    };
    let mut length = 0;
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (first, last) = value.trim().strip_prefix("bytes=")?.split_once('-')?;
                let last: u64 = last.parse().unwrap();
                request.range = Some(first.parse().unwrap()..last + 1);
            }
            "content-length" => length = value.trim().parse().unwrap(),
            "authorization" => request.is_signed = value.contains("Signature="),
            _ => {}
        }
    }
    from.read_exact(&mut vec![0; length]).ok()?;
    Some(request)
}
