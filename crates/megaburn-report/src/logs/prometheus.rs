//! Metrics for Prometheus: a thread answers `GET /metrics` in the text format.
//!
//! The page has the numbers of the last step and of the last evaluations as gauges, and the steps
//! and tokens so far as counters. The server is written here because it answers one small request
//! at a time: a crate would bring more code than the hundred lines below.
//!
//! Source: <https://prometheus.io/docs/instrumenting/exposition_formats>.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{append_file::AppendFile, log::Log, values::Values};
use crate::metrics::MetricsRecord;

/// How long a client may take for its request.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest request that is read.
const LONGEST: usize = 8 << 10;

/// The text of the page, empty before the first step.
type Text = Arc<Mutex<String>>;

/// Serves metrics until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    text: Text,
    stops: Arc<AtomicBool>,
}

impl MetricsServer {
    /// Serves on this port of the addresses that `host` names; port 0 is any free one.
    ///
    /// # Errors
    /// The address cannot be used, or the system cannot start a thread.
    pub fn start(host: &str, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((host, port))?;
        let server = Self {
            address: listener.local_addr()?,
            text: Text::default(),
            stops: Arc::default(),
        };
        let (text, stops) = (server.text.clone(), server.stops.clone());
        let serve = move || {
            for client in listener.incoming() {
                if stops.load(Ordering::Acquire) {
                    return;
                }
                // A client that went away, or asked for something else, is of no consequence.
                match client {
                    Ok(client) => drop(answer(client, &text)),
                    // Too many open files: the next attempt would fail at once.
                    Err(_) => thread::sleep(Duration::from_millis(50)),
                }
            }
        };
        thread::Builder::new()
            .name("prometheus".into())
            .spawn(serve)?;
        Ok(server)
    }

    /// The address that it serves on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The page with the metrics of the run of this name.
    pub(super) fn page(&self, run_name: &str) -> Page {
        Page {
            text: self.text.clone(),
            run: format!("run=\"{}\"", escaped(run_name)),
            step: BTreeMap::new(),
            evaluations: BTreeMap::new(),
            counters: [0, 0],
        }
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Release);
        // Wakes the thread, which then frees the port.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let _ = TcpStream::connect_timeout(&address, Duration::from_millis(200));
    }
}

/// Reads a request and answers it.
fn answer(mut client: TcpStream, text: &Text) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > LONGEST {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        let mut bytes = [0; 1024];
        match client.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => request.extend(&bytes[..read]),
        }
    }
    let request = String::from_utf8_lossy(&request);
    let mut words = request.split_whitespace();
    let (method, path) = (words.next(), words.next().unwrap_or_default());
    let path = path.split('?').next();
    let (status, body) = match (method, path) {
        (Some("GET"), Some("/metrics")) => {
            let text = text.lock().unwrap_or_else(PoisonError::into_inner);
            ("200 OK", text.clone())
        }
        _ => ("404 Not Found", "the metrics are at /metrics\n".to_string()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
        Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes())
}

/// Values of gauges, by the name of the metric and its labels.
type Gauges = BTreeMap<(String, String), f64>;

/// What the page shows.
#[derive(Debug)]
pub(super) struct Page {
    text: Text,
    /// The label of the run.
    run: String,
    step: Gauges,
    evaluations: Gauges,
    /// Steps and tokens.
    counters: [u64; 2],
}

impl Page {
    fn gauges(&self, values: &Values) -> Gauges {
        let gauge = |(name, number): &(String, f64)| {
            // Values inside of others have their own name as a label.
            let (name, of) = name.split_once('/').unwrap_or((name, ""));
            let mut labels = self.run.clone();
            let mut name = name.to_string();
            if let Some(data) = &values.evaluated {
                let _ = write!(labels, ",data=\"{}\"", escaped(data));
                if !name.starts_with("eval_") {
                    name = format!("eval_{name}");
                }
            }
            if !of.is_empty() {
                let _ = write!(labels, ",of=\"{}\"", escaped(of));
            }
            ((format!("megaburn_{name}"), labels), *number)
        };
        let is_gauge = |(name, _): &&(String, f64)| name != "consumed_tokens";
        values.numbers.iter().filter(is_gauge).map(gauge).collect()
    }

    fn show(&self) -> String {
        let mut text = String::new();
        let mut last = "";
        for ((name, labels), value) in self.step.iter().chain(&self.evaluations) {
            if name != last {
                let _ = writeln!(text, "# TYPE {name} gauge");
                last = name;
            }
            let value = match *value {
                value if value.is_nan() => "NaN".to_string(),
                value => value.to_string(),
            };
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
        let names = ["megaburn_steps_total", "megaburn_tokens_total"];
        for (name, count) in names.into_iter().zip(self.counters) {
            let _ = writeln!(
                text,
                "# TYPE {name} counter\n{name}{{{}}} {count}",
                self.run
            );
        }
        text
    }
}

impl Log for Page {
    fn write(&mut self, record: &MetricsRecord) {
        let values = Values::of(record);
        let gauges = self.gauges(&values);
        match record {
            MetricsRecord::Step(step) => {
                self.step = gauges;
                let tokens = step.consumed_tokens;
                let counted = self.counters[1] + step.tokens;
                self.counters = [step.step, tokens.unwrap_or(counted)];
            }
            MetricsRecord::Eval(_) => self.evaluations.extend(gauges),
        }
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = self.show();
    }

    fn end(&mut self, _: u8) {}

    fn file(&mut self) -> Option<&mut AppendFile> {
        None
    }
}

/// The value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
