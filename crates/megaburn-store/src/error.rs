use std::io;

use thiserror::Error;

/// Why an object cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum StoreError {
    #[error("{what} is 0 but must be at least 1")]
    Zero { what: &'static str },
    #[error(
        "`{url}` cannot be used by this build, which has no object stores: build megaburn with \
        `cargo build --release -p megaburn --features object-store`, or use files of this host"
    )]
    NoObjectStore { url: String },
    #[error("`{url}` is not the URL of {what}: {why}")]
    Url {
        url: String,
        what: &'static str,
        why: String,
    },
    #[error("`{url}` cannot be {action}: {why}; {remedy}")]
    Object {
        url: String,
        action: &'static str,
        obstacle: Obstacle,
        why: String,
        remedy: String,
    },
    #[error(
        "`{url}` was changed while it was read: {why}; start again when it is complete, because its \
        bytes would be mixed with those of before"
    )]
    Changed { url: String, why: String },
    #[error("the file on this host that belongs to `{url}` cannot be {action}: {source}")]
    File {
        url: String,
        action: &'static str,
        source: io::Error,
    },
    #[error("`{url}` was not {action}, because the work was given up")]
    Cancelled { url: String, action: &'static str },
}

/// Why a server refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// There is no such object or bucket.
    Missing,
    /// The credentials are missing or do not suffice. Some servers say so too if there is no such
    /// object.
    Denied,
    /// Something else.
    Other,
}

impl StoreError {
    /// Why the server refused the request; [`Obstacle::Other`] if it did not answer.
    pub fn obstacle(&self) -> Obstacle {
        match self {
            Self::Object { obstacle, .. } => *obstacle,
            _ => Obstacle::Other,
        }
    }
}
