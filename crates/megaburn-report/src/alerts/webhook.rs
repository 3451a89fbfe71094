//! Posts an alert to a URL, by plain HTTP.
//!
//! It is written here because a client of HTTP would bring TLS and its dependencies into every
//! build. A service that needs HTTPS is reached by a command, such as `curl`.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

/// How long posting may take.
const LIMIT: Duration = Duration::from_secs(10);
/// The longest status line that is read.
const LONGEST: usize = 1 << 10;

/// A URL that alerts are posted to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    /// The host and the port, as they are in the URL.
    authority: String,
    host: String,
    port: u16,
    path: String,
}

impl Webhook {
    /// Reads a URL, such as `http://host:8080/path`.
    ///
    /// # Errors
    /// What the URL must be.
    pub fn parse(url: &str) -> Result<Self, String> {
        const RULE: &str = "a URL such as http://host:8080/path";
        if url.starts_with("https://") {
            return Err(
                "a URL of plain HTTP; for HTTPS set alerts.command = \"curl -sf -d @- URL\"".into(),
            );
        }
        let rest = url.strip_prefix("http://").ok_or(RULE)?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let is_plain = |c: char| c.is_ascii_graphic() && !"@#?\\".contains(c);
        let is_sendable = path.chars().all(|c| c.is_ascii_graphic());
        if authority.is_empty() || !authority.chars().all(is_plain) || !is_sendable {
            return Err(RULE.into());
        }
        // An address of IPv6 is in brackets and has colons itself.
        let after_host = authority.rfind(']').map_or(0, |at| at + 1);
        let (host, port) = match authority[after_host..].find(':') {
            Some(at) => {
                let (host, port) = authority.split_at(after_host + at);
                (host, port[1..].parse().map_err(|_| RULE)?)
            }
            None => (authority, 80),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(RULE.into());
        }
        let path = if path.is_empty() { "/" } else { path };
        Ok(Self {
            host: host.to_string(),
            port,
            path: path.to_string(),
            authority: authority.to_string(),
        })
    }

    /// Posts a JSON text, within ten seconds.
    ///
    /// # Errors
    /// The host cannot be reached or does not answer, or the answer is not one of success.
    pub(super) fn post(&self, json: &str) -> io::Result<()> {
        let until = Instant::now() + LIMIT;
        let mut server = self.connect(until)?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: megaburn\r\nContent-Type: \
            application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.path,
            self.authority,
            json.len()
        );
        server.set_write_timeout(Some(left(until)?))?;
        server.write_all((head + json).as_bytes())?;
        let mut answer = Vec::new();
        while !answer.contains(&b'\n') && answer.len() < LONGEST {
            server.set_read_timeout(Some(left(until)?))?;
            let mut bytes = [0; 256];
            match server.read(&mut bytes)? {
                0 => break,
                read => answer.extend(&bytes[..read]),
            }
        }
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.lines().next().unwrap_or_default();
        let is_success = |code: &str| code.len() == 3 && code.starts_with('2');
        match status.split(' ').nth(1).is_some_and(is_success) {
            true => Ok(()),
            false => Err(io::Error::other(format!("the answer is `{status}`"))),
        }
    }

    fn connect(&self, until: Instant) -> io::Result<TcpStream> {
        let mut last = io::Error::other("the host has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, left(until)?) {
                Ok(server) => return Ok(server),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// The time that is left.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

impl fmt::Display for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("http://host", "host", 80, "/")]
    #[case("http://host:8080/a/b?c=d", "host", 8080, "/a/b?c=d")]
    #[case("http://[::1]:9/x", "::1", 9, "/x")]
    #[case("http://[::1]/x", "::1", 80, "/x")]
    fn a_url_is_taken_apart(
        #[case] url: &str,
        #[case] host: &str,
        #[case] port: u16,
        #[case] path: &str,
    ) {
        let webhook = Webhook::parse(url).unwrap();
        let found = (webhook.host.as_str(), webhook.port, webhook.path.as_str());
        assert_eq!(found, (host, port, path));
    }

    #[rstest]
    #[case("https://host/x", "curl")]
    #[case("host:80/x", "http://host:8080/path")]
    #[case("http://", "http://host:8080/path")]
    #[case("http://:80/", "http://host:8080/path")]
    #[case("http://user@host/", "http://host:8080/path")]
    #[case("http://host:80000/", "http://host:8080/path")]
    #[case("http://host/a b", "http://host:8080/path")]
    fn what_cannot_be_posted_to_is_refused(#[case] url: &str, #[case] rule: &str) {
        let why = Webhook::parse(url).unwrap_err();
        assert!(why.contains(rule), "{why}");
    }

    /// A server that gives one answer, and returns the request.
    fn served(answer: &'static str) -> (Webhook, thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let serve = move || {
            let (mut client, _) = listener.accept().unwrap();
            let mut request = String::new();
            while !request.ends_with('}') {
                let mut bytes = [0; 512];
                let read = client.read(&mut bytes).unwrap();
                request += std::str::from_utf8(&bytes[..read]).unwrap();
            }
            client.write_all(answer.as_bytes()).unwrap();
            request
        };
        (Webhook::parse(&url).unwrap(), thread::spawn(serve))
    }

    #[test]
    fn an_alert_is_posted_as_json() {
        let (webhook, server) = served("HTTP/1.1 204 No Content\r\n\r\n");
        webhook.post("{\"event\":\"nan\"}").unwrap();
        let request = server.join().unwrap();
        assert!(
            request.starts_with("POST /hook HTTP/1.1\r\nHost: 127.0.0.1:"),
            "{request}"
        );
        assert!(request.contains("Content-Length: 15\r\n"), "{request}");
        assert!(
            request.ends_with("\r\n\r\n{\"event\":\"nan\"}"),
            "{request}"
        );
    }

    #[test]
    fn an_answer_without_success_is_an_error() {
        let (webhook, server) = served("HTTP/1.1 404 Not Found\r\n\r\n");
        let error = webhook.post("{}").unwrap_err().to_string();
        assert_eq!(error, "the answer is `HTTP/1.1 404 Not Found`");
        server.join().unwrap();
    }
}
