//! The launcher's end of the connection to a rank.

use std::{
    io::{self, BufReader},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::Stdio,
    thread,
    time::Duration,
};

use super::wire::{FromRank, ToRank, receive, send};

/// How long a rank may take to accept a message. A thread of it waits for one, so this is immediate.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection to a rank. Dropping it ends a rank that waits for a restart.
#[derive(Debug)]
pub(crate) struct RankLink(UnixStream);

impl RankLink {
    /// A connection, and its other end as the standard input of a rank.
    ///
    /// # Errors
    /// The system has no more files.
    pub(crate) fn new() -> io::Result<(Self, Stdio)> {
        let (own, of_rank) = UnixStream::pair()?;
        own.set_write_timeout(Some(PATIENCE))?;
        Ok((Self(own), OwnedFd::from(of_rank).into()))
    }

    /// Starts a thread that calls `say` with each message of the rank, until it ends.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub(crate) fn listen(&self, say: impl Fn(FromRank) + Send + 'static) -> io::Result<()> {
        let mut from = BufReader::new(self.0.try_clone()?);
        let work = move || {
            // A program that writes anything else to its standard input is no rank that restarts.
            while let Ok(Some(message)) = receive(&mut from) {
                say(message);
            }
        };
        thread::Builder::new()
            .name("rank-link".into())
            .spawn(work)
            .map(drop)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The rank has ended.
    pub(crate) fn send(&self, message: &ToRank) -> io::Result<()> {
        send(&self.0, message)
    }
}

impl Drop for RankLink {
    /// Ends the thread that listens, which has a copy of the connection.
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}
