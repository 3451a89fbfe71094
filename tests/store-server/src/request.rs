//! Requests as they arrive.

use std::io::BufRead;
use std::ops::Range;

/// A request as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Such as `GET`.
    pub method: String,
    /// The path of the object, without `%` and without the query.
    pub path: String,
    /// Names and values of the query.
    pub query: Vec<(String, String)>,
    /// The bytes of the object that it asks for, if not for all.
    pub range: Option<Range<u64>>,
    /// Whether it is signed with credentials.
    pub is_signed: bool,
    /// What it sends.
    pub body: Vec<u8>,
}

impl Request {
    /// The value of a name in the query.
    pub fn value(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(of, _)| of == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn read(from: &mut impl BufRead) -> Option<Self> {
        let mut line = String::new();
        from.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let mut words = line.split_whitespace();
        let method = words.next()?.into();
        let target = words.next()?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let query = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(name), decoded(&value.replace('+', " ")))
        });
        let mut request = Self {
            method,
            path: decoded(path),
            query: query.collect(),
            range: None,
            is_signed: false,
            body: Vec::new(),
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
                    let last: u64 = last.parse().ok()?;
                    request.range = Some(first.parse().ok()?..last + 1);
                }
                "content-length" => length = value.trim().parse().ok()?,
                "authorization" => request.is_signed = value.contains("Signature="),
                _ => {}
            }
        }
        request.body = vec![0; length];
        from.read_exact(&mut request.body).ok()?;
        Some(request)
    }
}

/// A part of a URL without `%`: some clients write every `/` and `.` of a name so.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(digits, 16).unwrap_or(b'?'));
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
