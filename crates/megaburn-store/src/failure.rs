//! Why a request failed, and whether another one may succeed.

use std::error::Error;
use std::io;

use object_store::client::HttpError;

use crate::answer::{Answer, Head};

/// The most characters of a server's message that are shown.
const SHOWN: usize = 300;

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another request may succeed.
    Temporary(String),
    /// There is no such object.
    Missing(String),
    /// The credentials are missing or do not suffice.
    Denied(String),
    /// The server sends the whole object instead of a range.
    NoRanges,
    /// The object is not the one that was opened.
    Changed(String),
    /// No known authority has signed the certificate of the server.
    Untrusted(String),
    /// No request will succeed.
    Permanent(String),
}

impl Failure {
    /// The failure of a request, which was for a range of an object or not.
    pub(crate) fn of(error: &object_store::Error, answer: &Answer, is_range: bool) -> Self {
        let Some(head) = answer.head() else {
            return match is_untrusted(error) {
                true => Self::Untrusted(cause(error)),
                false => Self::Temporary(cause(error)),
            };
        };
        let why = status_text(&head, error);
        match head.status {
            200 if is_range => Self::NoRanges,
            404 | 410 => Self::Missing(why),
            401 | 403 => Self::Denied(why),
            // The object is shorter than it was.
            412 | 416 => Self::Changed(why),
            408 | 429 | 500..=599 => Self::Temporary(why),
            // An answer to an upload may begin well and then say why it failed.
            200..=299 => Self::Temporary(cause(error)),
            _ => Self::Permanent(why),
        }
    }
}

/// The deepest causes of an error, after what it says itself if that is no answer of a server.
pub(crate) fn cause(error: &object_store::Error) -> String {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        // The errors before this one only repeat its text.
        if error.is::<HttpError>() {
            texts.clear();
        } else {
            texts.push(error.to_string());
        }
        source = error.source();
    }
    let mut shown: Vec<&str> = Vec::new();
    for text in &texts {
        if !shown.iter().any(|before| before.contains(text.as_str())) {
            shown.push(text);
        }
    }
    excerpt(&shown.join(": "))
}

/// Whether the certificate of the server was refused.
fn is_untrusted(error: &object_store::Error) -> bool {
    let mut next: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(rustls::Error::InvalidCertificate(_)) = error.downcast_ref() {
            return true;
        }
        // What is inside such an error is not its source.
        let inner = error.downcast_ref().and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}

/// The status of an answer with the message of the server.
fn status_text(head: &Head, error: &object_store::Error) -> String {
    let text = error.to_string();
    let after = text.split_once("status code: ").map(|(_, after)| after);
    let after = after.map(|after| after.trim_end_matches([':', ' ', '\n']));
    let shown = after.map_or_else(|| head.status.to_string(), excerpt);
    format!("the server answers {shown}")
}

/// The beginning of a text in one line.
fn excerpt(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", &line[..end]),
        None => line,
    }
}
