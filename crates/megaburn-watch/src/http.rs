//! Just enough of HTTP for a page that reads: `GET` and `HEAD`, one request a connection.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::IpAddr,
    time::Instant,
};

use httparse::{Request as Head, Status};

/// The longest head of a request, in bytes.
const LONGEST_HEAD: usize = 16 * 1024;
const MOST_HEADERS: usize = 64;

/// A request to read something.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The path without the query.
    pub(crate) path: String,
    query: String,
    host: Option<String>,
    is_head: bool,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Response {
    status: u16,
    content_type: &'static str,
    body: Vec<u8>,
}

impl Request {
    /// Reads the head of a request, which must arrive in time.
    ///
    /// # Errors
    /// The bytes are not a request for reading: the error is the answer. `Ok(None)`: the other side
    /// closed the connection without a request.
    pub(crate) fn read(
        stream: &mut impl Read,
        until: Instant,
    ) -> io::Result<Result<Option<Self>, Response>> {
        let mut bytes = Vec::new();
        let mut part = [0; 2048];
        loop {
            let read = match stream.read(&mut part) {
                Ok(0) if bytes.is_empty() => return Ok(Ok(None)),
                Ok(0) => return Ok(Err(Response::error(400, "the request is cut off"))),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            bytes.extend_from_slice(&part[..read]);
            if Instant::now() > until {
                return Err(ErrorKind::TimedOut.into());
            }
            if let Some(result) = Self::parse(&bytes) {
                return Ok(result.map(Some));
            }
            if bytes.len() > LONGEST_HEAD {
                let why = "the head of the request is longer than 16 KiB";
                return Ok(Err(Response::error(431, why)));
            }
        }
    }

    /// Parses the head of a request; `None` if more bytes are needed.
    fn parse(bytes: &[u8]) -> Option<Result<Self, Response>> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut head = Head::new(&mut headers);
        match head.parse(bytes) {
            Ok(Status::Complete(_)) => {}
            Ok(Status::Partial) => return None,
            Err(error) => return Some(Err(Response::error(400, &format!("no HTTP: {error}")))),
        }
        let method = head.method.unwrap_or_default();
        if !matches!(method, "GET" | "HEAD") {
            let why = format!("{method} is not possible: this server only reads (GET)");
            return Some(Err(Response::error(405, &why)));
        }
        let target = head.path.unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let host = head
            .headers
            .iter()
            .find(|header| header.name.eq_ignore_ascii_case("host"));
        let host = host.and_then(|header| std::str::from_utf8(header.value).ok());
        Some(Ok(Self {
            path: path.to_string(),
            query: query.to_string(),
            host: host.map(String::from),
            is_head: method == "HEAD",
        }))
    }

    /// The value of a name in the query.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        let pairs = self
            .query
            .split('&')
            .filter_map(|pair| pair.split_once('='));
        pairs
            .filter(|pair| pair.0 == name)
            .map(|pair| pair.1)
            .next()
    }

    /// The number that is the value of a name in the query.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        self.value(name)?.parse().ok()
    }

    /// Whether the request names this host by an address or as `localhost`. A page of another site
    /// that has its name point to this host cannot read from it that way.
    pub(crate) fn is_for_this_host(&self, bound_to: &str) -> bool {
        let Some(host) = &self.host else {
            // Only a browser is lured by such a page, and browsers name the host.
            return true;
        };
        let host = match host.strip_prefix('[') {
            Some(v6) => v6.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        host.eq_ignore_ascii_case("localhost")
            || host.eq_ignore_ascii_case(bound_to)
            || host.parse::<IpAddr>().is_ok()
    }
}

impl Response {
    /// What was asked for.
    pub(crate) fn found(content_type: &'static str, body: impl Into<Vec<u8>>) -> Self {
        Self {
            status: 200,
            content_type,
            body: body.into(),
        }
    }

    /// A JSON value.
    pub(crate) fn json(value: &impl serde::Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self::found("application/json", body),
            Err(error) => Self::error(500, &error.to_string()),
        }
    }

    /// An error with its reason, as a JSON object.
    pub(crate) fn error(status: u16, why: &str) -> Self {
        Self {
            status,
            content_type: "application/json",
            body: serde_json::json!({ "error": why }).to_string().into_bytes(),
        }
    }

    /// Writes the answer to `request`, or to what was no request.
    ///
    /// # Errors
    /// The connection was closed.
    pub(crate) fn write(
        &self,
        stream: &mut impl Write,
        request: Option<&Request>,
    ) -> io::Result<()> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            431 => "Request Header Fields Too Large",
            _ => "Internal Server Error",
        };
        // The page loads nothing from elsewhere, and runs no script that is not the program's.
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: \
             no-referrer\r\nContent-Security-Policy: default-src 'none'; script-src 'self'; style-src \
             'self'; img-src 'self' data:; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\r\n",
            self.status,
            self.content_type,
            self.body.len(),
        );
        stream.write_all(head.as_bytes())?;
        if !request.is_some_and(|request| request.is_head) {
            stream.write_all(&self.body)?;
        }
        stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use std::time::Duration;

    use super::*;

    fn read(text: &str) -> Result<Option<Request>, u16> {
        let answer = Request::read(
            &mut text.as_bytes(),
            Instant::now() + Duration::from_secs(9),
        )
        .unwrap();
        answer.map_err(|response| response.status)
    }

    #[test]
    fn a_request_is_read_with_its_query() {
        let text = "GET /api/runs/1/metrics?from=12&mark=a.b HTTP/1.1\r\nHost: [::1]:80\r\n\r\n";
        let request = read(text).unwrap().unwrap();
        assert_eq!(request.path, "/api/runs/1/metrics");
        assert_eq!(request.number("from"), Some(12));
        assert_eq!(
            (request.value("mark"), request.value("mar")),
            (Some("a.b"), None)
        );
        assert_eq!(read("").unwrap(), None);
    }

    #[rstest]
    #[case("POST / HTTP/1.1\r\n\r\n", 405)]
    #[case("GET / HTTP/1.1\r\nHost", 400)]
    #[case("\u{0}\u{1}", 400)]
    #[case("GET / SPDY\r\n\r\n", 400)]
    fn what_is_no_request_for_reading_is_refused(#[case] text: &str, #[case] status: u16) {
        assert_eq!(read(text), Err(status));
    }

    #[test]
    fn a_head_without_end_is_refused() {
        let text = format!("GET / HTTP/1.1\r\nA: {}", "a".repeat(20_000));
        assert_eq!(read(&text), Err(431));
    }

    #[rstest]
    #[case("127.0.0.1:6070", true)]
    #[case("localhost:8000", true)]
    #[case("[::1]:6070", true)]
    #[case("node-7:6070", true)]
    #[case("evil.example", false)]
    #[case("localhost.evil.example:6070", false)]
    fn names_of_other_hosts_are_refused(#[case] host: &str, #[case] is_ours: bool) {
        let text = format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let request = read(&text).unwrap().unwrap();
        assert_eq!(request.is_for_this_host("node-7"), is_ours);
    }
}
