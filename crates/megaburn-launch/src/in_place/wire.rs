//! The messages between a rank and its launcher: one line of JSON each.

use std::io::{self, BufRead, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The longest message.
const LONGEST: u64 = 1 << 16;

/// What a rank says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// It waits for a restart if it loses a peer.
    Enrolled,
    /// Its groups are closed, and it waits for a restart.
    Waits(WaitReason),
}

/// Why a rank waits for a restart in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WaitReason {
    /// It lost a peer.
    LostPeer {
        /// The number of steps that were done before.
        after_step: u64,
        /// Whether a rank hangs. Launchers then wait less for ranks that do not wait yet.
        hangs: bool,
    },
    /// The launcher asked it to [regroup](crate::LauncherRequests::regroup).
    Regroup,
}

/// What a launcher says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// To a rank that trains: save at the end of a step, and wait.
    Regroup,
    /// To a rank that trains: end the collectives, and wait, because the ranks of another host have
    /// ended.
    Leave,
    /// To a rank that waits.
    Restart(Restart),
}

/// How the ranks meet again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restart {
    pub(crate) attempt: usize,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// `None`: the token of the rank's environment.
    pub(crate) token: Option<String>,
    /// Why the attempt before this one ended.
    pub(crate) cause: Option<String>,
}

pub(super) fn send(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)
}

/// The next message, or `None` at the end of the connection.
///
/// # Errors
/// The connection is broken, or this is no message.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.by_ref().take(LONGEST).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_lines_and_a_cut_one_is_an_error() {
        let mut sent = Vec::new();
        let messages = [
            FromRank::Enrolled,
            FromRank::Waits(WaitReason::LostPeer {
                after_step: 7,
                hangs: true,
            }),
        ];
        for message in &messages {
            send(&mut sent, message).unwrap();
        }
        let mut from = &sent[..];
        for message in messages {
            assert_eq!(receive(&mut from).unwrap(), Some(message));
        }
        assert_eq!(receive::<FromRank>(&mut from).unwrap(), None);
        let cut = &sent[..sent.len() - 1];
        let mut from = cut;
        assert_eq!(receive(&mut from).unwrap(), Some(FromRank::Enrolled));
        receive::<FromRank>(&mut from).unwrap_err();
    }
}
