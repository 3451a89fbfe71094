//! Who was refused at rank 0's port, for the message of a rendezvous that fails.

use std::{fmt, net::SocketAddr};

/// More than so many say nothing new.
const KEPT: usize = 8;

/// Callers that do not belong to the job.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    first: Vec<String>,
    more: usize,
}

impl Refusals {
    /// Takes note of one and logs it.
    pub(super) fn note(&mut self, from: SocketAddr, why: String, master: &str) {
        let text = format!("{from} was refused: {why}");
        if self.first.len() < KEPT {
            tracing::warn!("rendezvous at {master}: {text}");
            self.first.push(text);
        } else {
            self.more += 1;
        }
    }
}

impl fmt::Display for Refusals {
    /// As the end of a sentence; nothing if nobody was refused.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for text in &self.first {
            write!(f, "; {text}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "; {more} more were refused"),
        }
    }
}
